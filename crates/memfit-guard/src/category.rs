//! What a block holds, as far as anybody has said.
//!
//! Responsible for the names. Not responsible for who says it ([`crate::label`]) nor for the sums ([`crate::ledger`]).

use serde::{Serialize, Serializer};

/// What a block holds.
///
/// The hook sees addresses, so every block starts as `Other`; Python, which knows the tensors, says
/// more by [`crate::label`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Category {
    /// What has not been named.
    #[default]
    Other,
    /// A parameter of a module or of an optimizer.
    Parameter,
    /// A buffer of a module.
    ModuleBuffer,
    /// The `.grad` of a parameter.
    Gradient,
    /// A tensor in an optimizer's state.
    OptimizerState,
    /// Held by an autograd graph.
    Activation,
    /// A copy of a parameter in another precision, made by autocast.
    CastCache,
    /// Keys and values of tokens that were decoded before.
    KvCache,
    /// Held by a dataset or a loader.
    Dataset,
    /// Held by Python's objects in another way.
    Variable,
    /// Gone again when the op, the backward or the update that made it was over.
    Temporary,
}

impl Category {
    /// Every category, in the order of [`CategoryBytes`].
    pub const ALL: [Self; 11] = [
        Self::Other,
        Self::Parameter,
        Self::ModuleBuffer,
        Self::Gradient,
        Self::OptimizerState,
        Self::Activation,
        Self::CastCache,
        Self::KvCache,
        Self::Dataset,
        Self::Variable,
        Self::Temporary,
    ];

    /// Whether it belongs to a model or its optimizer, and stays.
    #[must_use]
    pub const fn is_static(self) -> bool {
        matches!(
            self,
            Self::Parameter | Self::ModuleBuffer | Self::Gradient | Self::OptimizerState
        )
    }

    /// The name in JSON and in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Other => "other",
            Self::Parameter => "parameter",
            Self::ModuleBuffer => "module_buffer",
            Self::Gradient => "gradient",
            Self::OptimizerState => "optimizer_state",
            Self::Activation => "activation",
            Self::CastCache => "cast_cache",
            Self::KvCache => "kv_cache",
            Self::Dataset => "dataset",
            Self::Variable => "variable",
            Self::Temporary => "temporary",
        }
    }

    /// The category of a name.
    ///
    /// # Errors
    ///
    /// There is none.
    pub fn of_name(name: &str) -> Result<Self, NoCategory> {
        let mut all = Self::ALL.into_iter();
        let found = all.find(|category| category.name() == name);
        found.ok_or_else(|| NoCategory(name.to_owned()))
    }
}

/// A name that no category has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no category `{0}`")]
pub struct NoCategory(String);

/// Bytes of each category, indexed as [`Category::ALL`].
pub type CategoryBytes = [u64; Category::ALL.len()];

/// Bytes of each category under its name.
pub(crate) fn by_name<S: Serializer>(
    bytes: &CategoryBytes,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(Category::ALL.map(Category::name).iter().zip(bytes))
}
