//! What `memfit run` takes, as typed.
//!
//! Responsible for names and help. Not responsible for what the words mean to a script (the Python package says that).

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use memfit_engine::plan::ActionKind;

use super::kinds::KindParser;
use super::kinds::{Allowance, AllowanceParser};

#[derive(Debug, Args)]
pub(crate) struct RunArguments {
    /// Fit the script's training steps into so much memory: 3GiB, 60% of an unplanned step, plain bytes
    ///
    /// The first step is observed while all that autograd saves lies in a file; the following ones run by an
    /// exact plan. Losses, results and exit code stay what they are.
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true)]
    pub(crate) budget: Option<String>,

    /// Loosest class of action to consider even where a stricter one fits
    ///
    /// With `equivalent`, where no exact plan fits, the model runs on one piece of its batch after the other, if it
    /// treats the items of the batch apart. What changes numbers may be allowed by its own name (`--allow shrink`).
    #[arg(long, value_parser = AllowanceParser, value_delimiter = ',', default_value = "exact", value_name = "CLASS|KIND", requires = "budget")]
    pub(crate) allow: Vec<Allowance>,

    /// Leave a kind of action out (repeatable)
    #[arg(long, value_parser = KindParser, value_name = "KIND", requires = "budget")]
    pub(crate) forbid: Vec<ActionKind>,

    /// Offload activations, optimizer state and parameters to files in this folder, or to the host's memory (`host`, for scripts on CUDA) [default: where nothing else fits, the host's memory for scripts on CUDA, else a folder for temporary files]
    ///
    /// Where it pays, by the place's speed, which is measured when the first step is planned. Files have no name: nothing is left after the run.
    #[arg(long, value_name = "FOLDER|host", requires = "budget")]
    pub(crate) offload: Option<String>,

    /// Offload nothing, though nothing else fits
    #[arg(long, requires = "budget", conflicts_with = "offload")]
    pub(crate) no_offload: bool,

    /// Stop the script, with exit code 74, before the first step that would exceed the budget
    #[arg(long, requires = "budget")]
    pub(crate) strict: bool,

    #[command(flatten)]
    pub(crate) lease: RunLeaseArguments,

    /// Write the summary as JSON to a file
    #[arg(long, value_name = "FILE.json")]
    pub(crate) report: Option<PathBuf>,

    /// Record the history of CUDA memory and write it at the end, or when memory runs out
    #[arg(long, value_name = "FILE.pickle")]
    pub(crate) snapshot: Option<PathBuf>,

    /// Run a module instead of a file
    #[arg(short, long)]
    pub(crate) module: bool,

    /// The script or module, and its arguments
    #[arg(value_name = "SCRIPT", required = true, trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

/// The memory that a script leases from the broker.
#[derive(Debug, Args)]
pub(crate) struct RunLeaseArguments {
    /// Wait for room at the broker, without end or so many seconds, instead of giving up at once
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "inf",
        requires = "budget"
    )]
    pub(crate) wait: Option<f64>,

    /// Who goes first among those that wait: higher before lower, -128 to 127
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_hyphen_values = true,
        requires = "budget"
    )]
    pub(crate) priority: i8,

    /// Where to lease the budget: `host` or `cuda:0` [default: the broker's first GPU, else the host]
    #[arg(long, value_name = "DEVICE", requires = "budget")]
    pub(crate) device: Option<String>,

    /// Run without a lease where the broker is still away after the wait, or 5 s, instead of giving up
    #[arg(long, requires = "budget")]
    pub(crate) alone: bool,

    /// Lease nothing, though a broker runs
    #[arg(long, conflicts_with_all = ["wait", "device", "alone"])]
    pub(crate) no_lease: bool,
}
