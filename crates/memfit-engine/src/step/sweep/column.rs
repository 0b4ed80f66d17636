//! One kind of counters of a sweep, which can say what was touched.
//!
//! Responsible for the values, and, while they are watched, for which of them a section of the sweep looked at and
//! what they were before. Not responsible for what they mean (`state.rs`) nor for what follows from it
//! (`incremental.rs`).

/// Values by index.
#[derive(Debug, Clone, Default)]
pub(in crate::step) struct Column<T> {
    values: Vec<Stamped<T>>,
    is_watched: bool,
    /// Number of the section.
    stamp: u32,
    /// What this section touched, with its value before.
    touched: Vec<(u32, T)>,
}

/// A value, and the section in which it was touched last.
#[derive(Debug, Clone, Copy, Default)]
struct Stamped<T> {
    value: T,
    stamp: u32,
}

impl<T: Copy + Default> Column<T> {
    /// All as at the start of a step.
    pub(super) fn reset(&mut self, length: usize) {
        self.values.clear();
        self.values.resize(length, Stamped::default());
        self.stamp = 0;
    }

    /// From here on, or until further notice not, it is remembered what is touched.
    pub(super) fn watch(&mut self, is_watched: bool) {
        self.is_watched = is_watched;
        self.start_section();
    }

    /// Forgets what was touched so far.
    pub(super) fn start_section(&mut self) {
        self.touched.clear();
        // A reset comes long before it overflows.
        self.stamp = self.stamp.wrapping_add(1);
    }

    /// For what the sweep reads or changes.
    #[inline]
    pub(in crate::step) fn at(&mut self, index: usize) -> &mut T {
        let stamped = &mut self.values[index];
        if self.is_watched && stamped.stamp != self.stamp {
            stamped.stamp = self.stamp;
            self.touched.push((short(index), stamped.value));
        }
        &mut stamped.value
    }

    /// What the section does depends on this.
    #[inline]
    pub(in crate::step) fn touch(&mut self, index: usize) {
        if self.is_watched {
            self.at(index);
        }
    }

    /// For reports: nothing depends on it.
    #[inline]
    pub(super) fn peek(&self, index: usize) -> &T {
        &self.values[index].value
    }

    #[inline]
    pub(in crate::step) fn set(&mut self, index: u32, value: T) {
        self.values[index as usize].value = value;
    }

    /// What the section touched, with the values before it.
    #[inline]
    pub(in crate::step) fn touched(&self) -> &[(u32, T)] {
        &self.touched
    }
}

/// The indices of a trace fit: they come from its own.
#[expect(
    clippy::cast_possible_truncation,
    reason = "indices of a trace are 32 bits"
)]
const fn short(index: usize) -> u32 {
    index as u32
}
