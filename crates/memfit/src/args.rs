//! The command line as typed.
//!
//! Responsible for names, help and examples: shell completions, the man page and the reference are
//! made from these definitions. Not responsible for what the words mean ([`crate::request`]). What
//! commands work on is in `target.rs`, what `plan` and `verify` take in `planning.rs`, what `run` takes in `run.rs`, what the commands about sharing take in
//! `sharing.rs`; the kinds of action are read in `kinds.rs`.

mod kinds;
mod planning;
mod run;
mod sharing;
mod target;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use kinds::{kinds_of, loosest};
pub(crate) use planning::{PlanArguments, PlanChoiceArguments, VerifyArguments};
pub(crate) use run::{RunArguments, RunLeaseArguments};
pub(crate) use sharing::{BrokerArguments, DevicesArguments, PsArguments, TopArguments};
pub(crate) use target::{DeviceChoice, TargetArguments};

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// Fit PyTorch training and inference into the memory you have.
#[derive(Debug, Parser)]
#[command(
    name = "memfit",
    version,
    styles = STYLES,
    max_term_width = 100,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "\
Examples:
  memfit predict examples/gpt2.py:build                 what the step takes, and where
  memfit plan    examples/gpt2.py:build --budget 3GiB   how to make it fit
  memfit verify  examples/gpt2.py:build --budget 3GiB   run it both ways and compare
  memfit prune   examples/gpt2.py:build --budget 3GiB   a smaller model whose step fits
  memfit place   step.csv --minimize                    offsets for allocations, lowest arena
  memfit show    step.memfit                            what is in a saved trace or plan
  memfit explain snapshot.pickle                        why a CUDA memory snapshot peaked
  memfit run     train.py --epochs 3                    run a script and say what it took
  memfit run     --budget 6GiB train.py                 fit the training steps of a script
  memfit run     --budget 6GiB --wait train.py          lease that much first, and wait for it
  memfit broker  --memory host=16GiB                    grant memory to processes, never too much
  memfit ps                                             who holds what, and who waits
  memfit top                                            the same, with devices and processes, live
  memfit devices --fit examples/gpt2.py:build           which device has room for a step
  memfit doctor                                         what works here, what does not, and why

Exit codes:
  0    it fits, or the work is done
  1    it does not fit, no placement was found, `verify` found a difference or an overshoot, or
       `explain` an OOM or a leak, or `doctor` that memfit does not work here
  2    wrong use or bad input
  74   `memfit run --strict`: the script would not have kept its budget, or did not
  75   `memfit run`: the broker had no room, and the script was not run
  101  a bug in memfit
  130  interrupted
`memfit run` exits with the script's own code."
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,

    #[command(flatten)]
    pub(crate) output: OutputArguments,
}

/// Options about output, on every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArguments {
    /// Form of the report on standard output
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    pub(crate) format: Format,

    /// When to use colour
    #[arg(long, global = true, value_enum, default_value_t = ColorChoice::Auto, value_name = "WHEN")]
    pub(crate) color: ColorChoice,

    /// Show no progress and no notes
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,

    /// Say on standard error what is being done and how long it took
    #[arg(short, long, global = true, conflicts_with = "quiet")]
    pub(crate) verbose: bool,
}

/// Form of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    Text,
    /// For programs; integers are bytes
    Json,
}

/// When output is coloured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless the environment says `NO_COLOR`
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Say how much memory a step takes, and what takes it, without running it
    #[command(after_help = "\
Examples:
  memfit predict examples/gpt2.py:build
  memfit predict examples/gpt2.py:build --set batch=8 --set sequence=1024
  memfit predict examples/gpt2.py:build --budget 6GiB      exit code 1 when it does not fit
  memfit predict examples/gpt2.py:build --gpu rtx4090      does it run on one? none is needed
  memfit predict my_project.train:workload --save step.memfit
  memfit predict step.memfit --batch 32                    the same step with another batch")]
    Predict(PredictArguments),

    /// Find the fastest way to make a step fit a budget
    #[command(after_help = "\
Examples:
  memfit plan examples/gpt2.py:build --budget 3GiB
  memfit plan examples/gpt2.py:build --budget 60%          of the unplanned predicted peak
  memfit plan step.memfit --budget 3GiB                    from a saved trace
  memfit plan examples/gpt2.py:build --budget 2GiB --allow equivalent --save gpt2.memfit
  memfit plan examples/gpt2.py:build --budget 3GiB --own-loop
  memfit plan examples/gpt2.py:build --pareto front.html   step time against peak, over all budgets")]
    Plan(PlanArguments),

    /// Run real steps with and without the plan and compare memory, time, loss and gradients
    #[command(after_help = "\
Examples:
  memfit verify examples/gpt2.py:build --budget 50%
  memfit verify examples/gpt2.py:build --budget 3GiB --format json
  memfit verify examples/gpt2.py:build --budget 3GiB --compile       under torch.compile

The unplanned step really runs: it needs the memory that `memfit predict` says.")]
    Verify(VerifyArguments),

    /// Make a smaller model by removing the channels and heads that it misses least
    #[command(after_help = "\
Examples:
  memfit prune examples/resnet50.py:build --parameters 50% --save pruned.pt
  memfit prune model.py:build --budget 3GiB --save pruned.pt     the least pruning whose step fits
  memfit prune model.py:build --budget 60% --scores taylor       chosen by gradients of one step
  memfit prune model.py:build --parameters 50% --format json     what went, and what stays and why

`memfit.load_pruned(build, \"pruned.pt\")` builds the smaller model. Nothing is trained here. Channels
that have to go together are found in the recorded step; what is not understood stays. The model is
built with its weights.")]
    Prune(PruneArguments),

    /// Find offsets for allocations with known live ranges in the smallest arena
    #[command(after_help = "\
Examples:
  memfit place step.csv --minimize
  memfit place step.csv --capacity 1MiB                    exit code 1 when none is found
  memfit place step.csv --minimize --alignment 512 --output placed.csv
  memfit place step.csv --minimize --time-limit 10 --format json

The file has a header and the columns id, lower, upper, size, and perhaps alignment, as
google/minimalloc reads them; a live range is half-open.")]
    Place(PlaceArguments),

    /// Measure this machine, so that plans know what ops cost here
    #[command(after_help = "\
Examples:
  memfit calibrate                                         this machine's processor, about 15 s
  memfit calibrate --device cuda
  memfit calibrate --folder /scratch                       the disk there, for offload
  memfit calibrate --output node7.json --format json       a file of your own, for `--costs`

Products and convolutions by type and size, memory bandwidth from cache to beyond it, the cost of
an op that does nothing, copies between host and device, the disk. `memfit plan` uses the profile
while device, torch version and number of threads are the same.")]
    Calibrate(CalibrateArguments),

    /// Run an unmodified script, say what it took, and with a budget fit its training steps
    #[command(after_help = "\
Examples:
  memfit run train.py --epochs 3                 the script's own arguments follow its name
  memfit run -m my_project.train --epochs 3      a module, as with python -m
  memfit run --budget 6GiB train.py              its training steps, unmodified, within 6 GiB
  memfit run --budget 6GiB --wait train.py       the same, when the broker has that much room
  memfit run --budget 4GiB --offload . train.py  files in this folder may take tensors
  memfit run --report run.json train.py          the summary as JSON in a file
  memfit run --snapshot oom.pickle train.py      CUDA memory history, for memfit explain

The script runs as `python train.py` would run it. Standard output is the script's; the summary goes
to standard error. The exit code is the script's; 75 when the broker had no room and nothing was
run; 74 with `--strict` when the budget would not have been kept.

Where a broker runs, the budget and what torch takes apart from tensors are leased before the script
starts, and what its plan does not need is given back. Where none was started, the script runs
alone; one that is away while others may hold what it granted is waited for.")]
    Run(RunArguments),

    /// Grant memory to processes before they use it, so that together they never exceed it
    #[command(after_help = "\
Examples:
  memfit broker --memory host=16GiB --memory cuda:0=70GiB
  memfit broker                                  all of the host's memory and of the GPUs, as found
  memfit broker --only-free                      of that, no more than others leave free
  memfit broker --memory host=16GiB --metrics 127.0.0.1:9464

Serves the processes of its own user until it is stopped; the log goes to standard error, one JSON
document a line (all grants with --verbose). Stopped and started again, it goes on with the leases
of those that still live. Processes that do not ask for leases are not limited; with --only-free
the others wait for what these have taken.")]
    Broker(BrokerArguments),

    /// Say who holds which memory, who waits for it, and for how long
    #[command(after_help = "\
Examples:
  memfit ps
  memfit ps --format json

The exit code is 1 when no broker runs.")]
    Ps(PsArguments),

    /// Say how much room each memory has, and which has enough for a step
    #[command(after_help = "\
Examples:
  memfit devices
  memfit devices --fit examples/gpt2.py:build    exit code 1 when no device has room for it
  memfit devices --fit step.memfit --format json

Room is what is free now and, where a broker runs, no more than it can still grant. A step needs its
unplanned predicted peak and what torch takes apart from tensors. `memfit plan` makes it need less.")]
    Devices(DevicesArguments),

    /// Show devices, leases and processes live, with their history
    #[command(after_help = "\
Examples:
  memfit top
  memfit top --interval 0.5
  memfit top --once                              one frame, as text
  memfit top --once --format json                the same for programs

Processes that wait for memory come first, then those with leases, each by what they use; the screen
shows the keys for other orders. Without a broker it shows devices and processes. GPU memory is what
NVML reports; the host memory of a process is its private memory, without files and shared pages.")]
    Top(TopArguments),

    /// Say what is installed, which features work here, and why the others do not
    #[command(after_help = "\
Examples:
  memfit doctor
  memfit doctor --offload /scratch               also how fast files in this folder are
  memfit doctor --format json                    the same for programs, and for reports of bugs

Trains a tiny model within a budget and compares what was predicted with what was measured.
All of it takes some seconds. The exit code is 1 when that fails; the last line then says what to do.")]
    Doctor(DoctorArguments),

    /// Print what is in a saved trace or plan
    #[command(after_help = "\
Examples:
  memfit show step.memfit
  memfit show plan.memfit --format json")]
    Show(ShowArguments),

    /// Say what happened in a CUDA memory snapshot: the peak, who owns it, fragmentation, OOM, leaks; or
    /// what an OOM message in a log decides
    #[command(after_help = "\
Examples:
  memfit explain snapshot.pickle                       why the peak, and who owns it
  memfit explain oom.pickle --device-memory 80GiB      which part of the device was missing
  memfit explain before.pickle after.pickle --steps 100
                                                       what grew between the two, for each step
  memfit explain snapshot.pickle --format json
  memfit explain train.log                             what the OOM messages in a log decide
  python train.py 2>&1 | memfit explain -

Record a snapshot with:
  torch.cuda.memory._record_memory_history()
  ...                                                  the steps to look at, three or more for leaks
  torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")

Nothing in the file is executed. The exit code is 1 when an OOM or a leak was found.")]
    Explain(ExplainArguments),

    /// Run the requests of a CUDA memory snapshot again under other allocator settings
    #[command(after_help = "\
Examples:
  memfit replay snapshot.pickle                            a list of settings, ranked
  memfit replay snapshot.pickle --set expandable_segments=True --set max_split_size_mb=256
  memfit replay snapshot.pickle --device-memory 24GiB      as if on another device

Exit code 1: the recording ran out of memory, and no replay avoids it.")]
    Replay(ReplayArguments),

    /// Print a completion script for a shell
    #[command(after_help = "\
Examples:
  memfit completions bash > ~/.local/share/bash-completion/completions/memfit
  memfit completions zsh > ~/.zfunc/_memfit")]
    Completions(CompletionsArguments),

    /// Print the manual page, of memfit or of one of its commands
    #[command(after_help = "\
Examples:
  memfit man > memfit.1
  memfit man plan | man -l -")]
    Man(ManArguments),
}

#[derive(Debug, Args)]
pub(crate) struct PredictArguments {
    #[command(flatten)]
    pub(crate) target: TargetArguments,

    /// Say whether the step fits these bytes, and which batch would (3GiB, 800MiB, 2GB, bytes, 60%)
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true)]
    pub(crate) budget: Option<String>,

    /// Say whether the step fits this GPU (h100, rtx4090, a100-80gb), which need not be here
    ///
    /// Implies `--device cuda`. What the caching allocator holds at the peak has to fit what PyTorch finds of such a card beside the CUDA context.
    #[arg(long, value_name = "NAME", conflicts_with = "budget")]
    pub(crate) gpu: Option<String>,

    /// Find the largest value of this argument of the target that the unplanned step fits with
    ///
    /// An integer: `batch`, `sequence`. Each trial captures the step; the answer fits, and one more does not. Needs `--budget` or `--gpu`.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["batch", "save"])]
    pub(crate) largest: Option<String>,

    /// Predict for another batch size
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) batch: Option<u64>,

    /// Kind of device to predict for, which need not be here [default: the one the workload is on]
    #[arg(long, value_enum)]
    pub(crate) device: Option<DeviceChoice>,

    /// Build the weights for real, also where this machine seems to have no memory for them
    ///
    /// By default models are built without weights, or with them where that fails and they fit what is free. What does not fit is swapped, or ends the process.
    #[arg(long)]
    pub(crate) real_weights: bool,

    /// Save the trace, for `memfit plan`, `predict` and `show`
    #[arg(long, value_name = "FILE.memfit")]
    pub(crate) save: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct PruneArguments {
    #[command(flatten)]
    pub(crate) target: TargetArguments,

    #[command(flatten)]
    pub(crate) size: PruneSizeArguments,

    /// How to score channels: by the squares of their parameters, or by parameter times gradient in a step
    #[arg(long, value_enum, default_value_t = ScoresChoice::Magnitude)]
    pub(crate) scores: ScoresChoice,

    /// Let channels go that a layer norm takes its mean over, such as the width of a transformer
    ///
    /// What is left is then normalised anew: the smaller model computes something else than the given one with zeros.
    #[arg(long)]
    pub(crate) through_norms: bool,

    /// Write the smaller model, for `memfit.load_pruned`
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,
}

/// How small the model shall be.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct PruneSizeArguments {
    /// Most memory the step may take: 3GiB, 800MiB, 2GB, plain bytes, or 60% of the unpruned peak
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true)]
    pub(crate) budget: Option<String>,

    /// How many parameters may be left: 50%, or a number
    #[arg(long, value_name = "COUNT", allow_hyphen_values = true)]
    pub(crate) parameters: Option<String>,
}

/// What channels are chosen by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ScoresChoice {
    Magnitude,
    Taylor,
}

#[derive(Debug, Args)]
pub(crate) struct PlaceArguments {
    /// The allocations
    #[arg(value_name = "FILE.csv")]
    pub(crate) file: PathBuf,

    #[command(flatten)]
    pub(crate) goal: PlaceGoalArguments,

    /// Alignment of allocations for which the file gives none (512 for CUDA)
    #[arg(long, value_name = "BYTES", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) alignment: u64,

    /// Threads; the answer is the same with any number [default: all cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<NonZeroUsize>,

    /// Give up after so many seconds and answer with the best found [default: a limit on work]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) time_limit: Option<f64>,

    /// Write the allocations with their offsets
    #[arg(long, value_name = "FILE.csv")]
    pub(crate) output: Option<PathBuf>,
}

/// What to look for.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct PlaceGoalArguments {
    /// Find any placement within these bytes (1MiB, 1048576)
    #[arg(long, value_name = "BYTES")]
    pub(crate) capacity: Option<String>,

    /// Find the lowest placement
    #[arg(long)]
    pub(crate) minimize: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CalibrateArguments {
    /// Kind of device to measure
    #[arg(long, value_enum, default_value_t = DeviceChoice::Cpu)]
    pub(crate) device: DeviceChoice,

    /// About how long to measure; less leaves large sizes out
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    pub(crate) seconds: f64,

    /// Folder whose disk to measure; the file there is removed [default: the temporary folder]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,

    /// Where to write the profile [default: memfit/<DEVICE>.json in the user's cache folder]
    #[arg(long, value_name = "FILE.json")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    /// Also measure how fast this folder, or the host's memory (`host`, for steps on CUDA), is for offloading
    #[arg(long, value_name = "FOLDER|host")]
    pub(crate) offload: Option<String>,

    /// Where the broker listens [default: the variable `MEMFIT_BROKER`, or memfit/broker.sock in the user's runtime folder]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArguments {
    /// A file written with `--save`
    #[arg(value_name = "FILE.memfit")]
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArguments {
    /// A file that `torch.cuda.memory._dump_snapshot` wrote, gzip'ed or not; or a text with an OOM message of
    /// PyTorch; `-` for standard input
    #[arg(value_name = "SNAPSHOT.pickle|LOG")]
    pub(crate) snapshot: PathBuf,

    /// A later snapshot of the same program: explain this one, and what grew since the first
    #[arg(value_name = "LATER.pickle")]
    pub(crate) later: Option<PathBuf>,

    /// Steps between the two snapshots [default: annotated optimizer steps, if there are any]
    #[arg(long, value_name = "N", requires = "later", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) steps: Option<u64>,

    /// Memory of the device, which no snapshot tells: 80GiB, 24GB, plain bytes
    ///
    /// With it an OOM is also divided into what other processes and libraries held.
    #[arg(long, value_name = "BYTES")]
    pub(crate) device_memory: Option<String>,

    /// Also write one page that opens offline: timeline, owners, stacks, segments (under 5 MB)
    #[arg(long, value_name = "FILE.html")]
    pub(crate) html: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ReplayArguments {
    /// A file that `torch.cuda.memory._dump_snapshot` wrote, gzip'ed or not
    #[arg(value_name = "SNAPSHOT.pickle")]
    pub(crate) snapshot: PathBuf,

    /// An option of `PYTORCH_CUDA_ALLOC_CONF`, on top of the recording's own (repeatable)
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub(crate) settings: Vec<String>,

    /// Replay on a device with so much memory [default: what a recorded OOM shows; else unlimited]
    #[arg(long, value_name = "BYTES")]
    pub(crate) device_memory: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArguments {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArguments {
    /// The command; the whole program when left out
    pub(crate) command: Option<String>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definitions_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples() {
        for command in Arguments::command().get_subcommands() {
            let help = command
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(help.starts_with("Examples:"), "{}", command.get_name());
        }
    }
}
