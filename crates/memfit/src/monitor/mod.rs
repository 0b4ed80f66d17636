//! `memfit top`: who uses which memory, live.
//!
//! Responsible for looking at the machine (`look.rs`), for what is remembered from look to look
//! (`history.rs`), for what is shown of it and in which order (`view.rs`), for drawing that (`draw.rs`) and for
//! the terminal (`terminal.rs`). The view is plain data, made without clock, terminal or files: the same
//! one is drawn, printed and written as JSON. Not responsible for granting anything (`broker/`).

mod draw;
mod history;
mod look;
mod terminal;
mod view;

pub(crate) use draw::frame_text;
pub(crate) use history::History;
pub(crate) use look::Looker;
pub(crate) use terminal::watch;
pub(crate) use view::{Sort, View};
