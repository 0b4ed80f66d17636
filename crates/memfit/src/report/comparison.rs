//! How two runs agree, and whether that is what a plan promised.

use memfit_engine::plan::Class;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How two runs agree.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
pub(crate) struct Comparison {
    #[serde(alias = "class")]
    pub(crate) agreement: Agreement,
    /// Absent when it is not a number.
    pub(crate) max_relative_error: Option<f64>,
}

/// The words for agreement, from strict to none.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, JsonSchema, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Agreement {
    /// Every bit is the same.
    Bitwise,
    /// The same up to rounding.
    Equivalent,
    /// Not the same.
    Different,
}

impl Comparison {
    /// Whether this is what a plan of `class` promised. NaN never is.
    pub(crate) fn keeps(self, class: Class) -> bool {
        match class {
            Class::Exact => self.agreement == Agreement::Bitwise,
            Class::Equivalent => self.agreement != Agreement::Different,
            Class::Approximate => self.max_relative_error.is_some_and(f64::is_finite),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_number_keeps_no_promise() {
        let off = |agreement, max_relative_error| Comparison {
            agreement,
            max_relative_error,
        };
        let classes = [Class::Exact, Class::Equivalent, Class::Approximate];
        let kept = |it: Comparison| classes.map(|class| it.keeps(class));
        assert_eq!(kept(off(Agreement::Bitwise, Some(0.0))), [true; 3]);
        assert_eq!(
            kept(off(Agreement::Equivalent, Some(1e-7))),
            [false, true, true]
        );
        assert_eq!(
            kept(off(Agreement::Different, Some(0.3))),
            [false, false, true]
        );
        for lost in [None, Some(f64::NAN), Some(f64::INFINITY)] {
            assert_eq!(kept(off(Agreement::Different, lost)), [false; 3]);
        }
    }
}
