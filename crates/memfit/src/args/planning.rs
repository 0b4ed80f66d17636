//! What `memfit plan` and `memfit verify` take, as typed.
//!
//! Responsible for names and help, and for the choices that every command with a plan has. Not responsible for
//! which kinds there are (`kinds.rs`) nor for what the words mean ([`crate::request`]).

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use memfit_engine::plan::ActionKind;

use super::kinds::{Allowance, AllowanceParser, KindParser};
use super::target::{DeviceChoice, TargetArguments};

/// Which plans are allowed.
#[derive(Debug, Args)]
pub(crate) struct PlanChoiceArguments {
    /// Loosest class of action to consider even where a stricter one fits
    ///
    /// Or what changes numbers by its own name (`--allow equivalent,shrink`).
    #[arg(long, value_parser = AllowanceParser, value_delimiter = ',', default_value = "exact", value_name = "CLASS|KIND")]
    pub(crate) allow: Vec<Allowance>,

    /// Leave a kind of action out (repeatable)
    #[arg(long, value_parser = KindParser, value_name = "KIND")]
    pub(crate) forbid: Vec<ActionKind>,

    /// Leave a module's numbers in their types where autocast or fewer bits are planned (repeatable)
    #[arg(long, value_name = "MODULE")]
    pub(crate) keep: Vec<String>,

    /// Only plan what works inside your own training loop: nothing outside the forward pass
    #[arg(long)]
    pub(crate) own_loop: bool,

    /// Answer after about so many seconds with the best plan found [default: a limit on work]
    ///
    /// More time than planning takes by default lets it look further. The answer then depends on the machine.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) time_limit: Option<f64>,

    /// Offload to files in this folder, or to the host's memory (`host`, for steps on CUDA)
    ///
    /// Activations between forward and backward, and the optimizer's state between updates, where it pays. The place's speed is measured where it is not known. What is written is gone after the run.
    #[arg(long, value_name = "FOLDER|host")]
    pub(crate) offload: Option<String>,

    /// Take op times from one profiled real step instead of a roofline of this machine
    #[arg(long)]
    pub(crate) profile: bool,

    /// Take op times from a profile that `memfit calibrate` wrote [default: this machine's, if kept]
    #[arg(long, value_name = "FILE.json", conflicts_with_all = ["profile", "gpu"])]
    pub(crate) costs: Option<PathBuf>,

    /// Take op times from a GPU's datasheet (h100, rtx4090, a100-80gb), for steps on CUDA
    #[arg(long, value_name = "NAME", conflicts_with = "profile")]
    pub(crate) gpu: Option<String>,
}

/// A part of something: `10%` or `0.1`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Part(pub(crate) f64);

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, whole) = match text.trim().strip_suffix('%') {
            Some(number) => (number, 100.0),
            None => (text, 1.0),
        };
        let part = number.trim().parse::<f64>().ok().map(|part| part / whole);
        part.filter(|part| part.is_finite() && *part > 0.0)
            .map(Self)
            .ok_or_else(|| "a part is written `10%` or `0.1`, and is above zero".to_owned())
    }
}

#[derive(Debug, Args)]
pub(crate) struct PlanArguments {
    #[command(flatten)]
    pub(crate) target: TargetArguments,

    /// Most memory the step may take: 3GiB, 800MiB, 2GB, plain bytes, or 60% of the unplanned peak
    #[arg(
        long,
        value_name = "BYTES",
        allow_hyphen_values = true,
        required_unless_present = "pareto"
    )]
    pub(crate) budget: Option<String>,

    #[command(flatten)]
    pub(crate) choice: PlanChoiceArguments,

    /// Kind of device to plan for, which need not be here [default: the one the workload is on]
    #[arg(long, value_enum)]
    pub(crate) device: Option<DeviceChoice>,

    /// Build the weights for real, also where this machine seems to have no memory for them
    ///
    /// By default models are built without weights, or with them where that fails and they fit what is free. What does not fit is swapped, or ends the process.
    #[arg(long)]
    pub(crate) real_weights: bool,

    /// Save the plan, for `memfit.load` and `memfit show`
    #[arg(long, value_name = "FILE.memfit")]
    pub(crate) save: Option<PathBuf>,

    /// Plan for many budgets and draw step time against peak, as a page or an image that opens offline
    ///
    /// The report and the JSON are then those of the front. `--budget` is not needed; if given, it is marked.
    #[arg(long, value_name = "FILE.html|FILE.svg", conflicts_with = "save")]
    pub(crate) pareto: Option<PathBuf>,

    /// Find the largest value of this argument of the target that a plan fits the step with
    ///
    /// An integer: `batch`, `sequence`. One row as it is, one for exact plans, one for equivalent plans too, each with its
    /// step time. Each trial captures the step and plans it; the answer fits, and one more does not.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["save", "pareto"])]
    pub(crate) largest: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    #[command(flatten)]
    pub(crate) target: TargetArguments,

    /// Most memory the step may take: 3GiB, 800MiB, 2GB, plain bytes, or 60% of the unplanned peak
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true)]
    pub(crate) budget: String,

    /// Verify the step as `memfit.fit(..., compile=True)` runs it, beside eager and `torch.compile` alone
    ///
    /// Compiled code rounds in another order, so loss and gradients may be off by twice what `torch.compile` alone
    /// is off, or 1e-5 if that is more. Where the step cannot be compiled within the budget, the eager plan is
    /// verified, and the reason printed.
    #[arg(long, conflicts_with = "own_loop")]
    pub(crate) compile: bool,

    /// Most that an approximate plan may be off by: 10%, 0.1 [default: 10%, for inference 5%]
    ///
    /// Gradients are compared with how much other examples would change them, outputs of inference with their own length.
    #[arg(long, value_name = "PART")]
    pub(crate) max_error: Option<Part>,

    #[command(flatten)]
    pub(crate) choice: PlanChoiceArguments,
}
