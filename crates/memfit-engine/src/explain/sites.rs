//! What a stack says: where in the user's code, in which part of the step, for what.
//!
//! Responsible for reading frames. Not responsible for what a block was used for in the end, which also
//! depends on when it was freed (`owners.rs`).
//!
//! A stack of PyTorch is a mixture: C++ frames of the op, frames of the interpreter, and the user's
//! Python frames, innermost first; backward runs on a thread of its own and has no Python frames. A stack
//! is told by its Python frames without plumbing; in backward by the autograd node and those frames, and
//! where there is neither by its C++ frames.

use crate::snapshot::{Frame, Snapshot, StackIndex, TextIndex};

/// Told in place of the stack of what was alive before recording, when the file has none.
pub const BEFORE_RECORDING: &str = "(alive before recording, no stack)";
/// Told in place of a stack that was not recorded.
pub const NO_STACK: &str = "(no stack recorded)";

/// Most C++ frames told of a stack without any other.
const MAX_NATIVE_FRAMES: usize = 6;

/// What a frame gives away, as bits.
mod mark {
    /// Some frame of Python.
    pub(super) const PYTHON: u32 = 1;
    /// `forward`, or a call of a module or of `torch.nn.functional`.
    pub(super) const FORWARD: u32 = 1 << 1;
    /// Autograd's engine, or `Tensor.backward` above it.
    pub(super) const BACKWARD: u32 = 1 << 2;
    /// The node that writes a parameter's gradient.
    pub(super) const ACCUMULATE: u32 = 1 << 3;
    /// A step of an optimizer.
    pub(super) const OPTIMIZER: u32 = 1 << 4;
    /// Scratch of cuBLAS or cuDNN.
    pub(super) const WORKSPACE: u32 = 1 << 5;
    /// A collective.
    pub(super) const COMMUNICATION: u32 = 1 << 6;
    /// A module is built, loaded or moved.
    pub(super) const PARAMETER: u32 = 1 << 7;
    /// A batch is loaded or moved.
    pub(super) const INPUT: u32 = 1 << 8;
    /// A cache of keys and values.
    pub(super) const KV_CACHE: u32 = 1 << 9;
    /// Forward inside backward: activation checkpointing computes it again.
    pub(super) const RECOMPUTED: u32 = 1 << 10;
    /// Files that say something only together with the function.
    pub(super) const MODULE_FILE: u32 = 1 << 11;
    pub(super) const OPTIMIZER_FILE: u32 = 1 << 12;
    pub(super) const AUTOGRAD_FILE: u32 = 1 << 13;
    pub(super) const DISTRIBUTED_FILE: u32 = 1 << 14;
    /// Gradients are dropped or set to zero.
    pub(super) const ZERO_GRAD: u32 = 1 << 15;
    /// A file of weights is read.
    pub(super) const CHECKPOINT: u32 = 1 << 16;
}

/// Part of a step that a stack belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Forward, or anything else outside the other two.
    Forward,
    /// Autograd's engine.
    Backward,
    /// The optimizer's step.
    Optimizer,
}

/// What one stack says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Site {
    marks: u32,
    /// Function of the autograd node's frame, if there is one.
    node: Option<TextIndex>,
}

macro_rules! questions {
    ($($(#[$doc:meta])* $name:ident: $mark:ident;)*) => {
        $($(#[$doc])* #[must_use] pub const fn $name(self) -> bool { self.marks & mark::$mark != 0 })*
    };
}

impl Site {
    questions! {
        /// Whether a module's forward is on the stack.
        is_in_forward: FORWARD;
        /// Whether a parameter's gradient is being written.
        accumulates_gradient: ACCUMULATE;
        /// Whether it is scratch of a library.
        is_workspace: WORKSPACE;
        /// Whether a collective asked for it.
        is_communication: COMMUNICATION;
        /// Whether a module is being built, loaded or moved.
        is_module_setup: PARAMETER;
        /// Whether a batch is being loaded or moved.
        is_input: INPUT;
        /// Whether a cache of keys and values asked for it.
        is_kv_cache: KV_CACHE;
        /// Whether a file of weights is read.
        is_checkpoint: CHECKPOINT;
        /// Whether it is an activation computed again in backward.
        is_recomputed: RECOMPUTED;
        /// Whether gradients are being dropped.
        is_zero_grad: ZERO_GRAD;
        /// Whether any Python frame is on it.
        has_python: PYTHON;
    }

    /// The part of a step it belongs to.
    #[must_use]
    pub const fn phase(self) -> Phase {
        if self.marks & mark::OPTIMIZER != 0 {
            Phase::Optimizer
        } else if self.marks & mark::BACKWARD != 0 {
            Phase::Backward
        } else {
            Phase::Forward
        }
    }
}

/// What every stack of a snapshot says.
#[derive(Debug)]
pub struct Sites<'a> {
    snapshot: &'a Snapshot,
    sites: Vec<Site>,
}

impl<'a> Sites<'a> {
    /// Reads all stacks. Texts are few and frames many, so texts are read once.
    #[must_use]
    pub fn of(snapshot: &'a Snapshot) -> Self {
        let texts = &snapshot.texts;
        let every = || (0..u32::try_from(texts.len()).unwrap_or(u32::MAX)).map(TextIndex);
        let files: Vec<u32> = every().map(|it| file_marks(texts.get(it))).collect();
        let functions: Vec<FunctionMarks> =
            every().map(|it| FunctionMarks::of(texts.get(it))).collect();
        let sites = (0..u32::try_from(snapshot.stacks.len()).unwrap_or(u32::MAX)).map(|index| {
            let mut reader = Reader::default();
            for frame in snapshot.stacks.get(StackIndex(index)) {
                let file = files[frame.file.0 as usize];
                let function = functions[frame.function.0 as usize];
                reader.read(frame, file, function);
            }
            reader.site()
        });
        let sites = sites.collect();
        Self { snapshot, sites }
    }

    /// What a stack says.
    #[must_use]
    pub fn get(&self, stack: StackIndex) -> Site {
        self.sites[stack.0 as usize]
    }

    /// The stack as text: one frame a line, innermost first, as `file:line function`.
    #[must_use]
    pub fn text(&self, stack: StackIndex) -> String {
        let mut lines = Vec::new();
        if let Some(node) = self.node(stack) {
            lines.push(format!("{node} (backward)"));
        }
        lines.extend(self.python_frames(stack).map(|frame| self.frame(frame)));
        if lines.is_empty() {
            let frames = self.snapshot.stacks.get(stack).iter();
            let native = frames.map(|frame| self.snapshot.texts.get(frame.function));
            let told = native.filter(|name| !is_native_plumbing(name));
            lines.extend(told.take(MAX_NATIVE_FRAMES).map(without_arguments));
        }
        lines.join("\n")
    }

    /// The autograd node a stack is in, such as `BmmBackward0`.
    #[must_use]
    pub fn node(&self, stack: StackIndex) -> Option<&'a str> {
        let site = self.get(stack);
        if site.accumulates_gradient() {
            return Some("AccumulateGrad");
        }
        node_name(self.snapshot.texts.get(site.node?))
    }

    /// The module a stack is in, as the chain of its `forward` frames from the outermost in, each as
    /// `file:line`; in backward the autograd node; else the nearest line of the user's code.
    #[must_use]
    pub fn module(&self, stack: StackIndex) -> String {
        let site = self.get(stack);
        if site.phase() == Phase::Backward && !site.is_recomputed() {
            let node = self.node(stack).unwrap_or("autograd");
            return node.to_owned();
        }
        let frames: Vec<&Frame> = self.python_frames(stack).collect();
        let mut chain: Vec<String> = frames
            .iter()
            .rev()
            .filter(|frame| self.snapshot.texts.get(frame.function) == "forward")
            .map(|frame| self.place(frame))
            .collect();
        if site.phase() == Phase::Optimizer || chain.is_empty() {
            let user = frames.iter().find(|frame| !self.is_of_a_package(frame));
            chain = user
                .into_iter()
                .map(|frame| self.frame_short(frame))
                .collect();
        }
        chain.join(" > ")
    }

    /// The innermost frame of the user's own code: outside installed packages.
    #[must_use]
    pub fn user_frame(&self, stack: StackIndex) -> Option<String> {
        let mut frames = self.python_frames(stack);
        let user = frames.find(|frame| !self.is_of_a_package(frame))?;
        Some(self.frame(user))
    }

    /// Whether the op that the user's code called is an addition.
    #[must_use]
    pub fn is_addition(&self, stack: StackIndex) -> bool {
        let frames = self.snapshot.stacks.get(stack).iter();
        let mut names = frames.map(|frame| self.snapshot.texts.get(frame.function));
        names.any(|name| {
            [
                "THPVariable_add(",
                "THPVariable_add_(",
                "THPVariable_iadd(",
                "at::_ops::add_Tensor::",
            ]
            .iter()
            .any(|part| name.contains(part))
        })
    }

    fn python_frames(&self, stack: StackIndex) -> impl Iterator<Item = &'a Frame> + '_ {
        let snapshot = self.snapshot;
        snapshot.stacks.get(stack).iter().filter(move |frame| {
            let file = snapshot.texts.get(frame.file);
            is_python(file) && !is_python_plumbing(file, snapshot.texts.get(frame.function))
        })
    }

    fn frame(&self, frame: &Frame) -> String {
        let texts = &self.snapshot.texts;
        let (file, function) = (texts.get(frame.file), texts.get(frame.function));
        format!("{file}:{} {function}", frame.line)
    }

    fn frame_short(&self, frame: &Frame) -> String {
        let function = self.snapshot.texts.get(frame.function);
        format!("{} {function}", self.place(frame))
    }

    fn place(&self, frame: &Frame) -> String {
        let file = self.snapshot.texts.get(frame.file);
        let name = file.rsplit(['/', '\\']).next().unwrap_or(file);
        format!("{name}:{}", frame.line)
    }

    fn is_of_a_package(&self, frame: &Frame) -> bool {
        let file = self.snapshot.texts.get(frame.file);
        ["site-packages/", "dist-packages/", "torch/", "lib/python3"]
            .iter()
            .any(|part| file.contains(part))
    }
}

/// Gathers what the frames of one stack say, innermost first.
#[derive(Debug, Default)]
struct Reader {
    site: Site,
    has_innermost_python: bool,
    forward_is_inside: bool,
}

impl Reader {
    fn read(&mut self, frame: &Frame, file: u32, function: FunctionMarks) {
        let is_in = |kind: u32| file & kind != 0;
        let mut marks = file | function.marks;
        if is_in(mark::PYTHON) {
            marks |= match function.python {
                PythonFunction::Forward => mark::FORWARD,
                PythonFunction::Backward if is_in(mark::AUTOGRAD_FILE) => mark::BACKWARD,
                PythonFunction::ModuleSetup if is_in(mark::MODULE_FILE) => mark::PARAMETER,
                PythonFunction::Load => mark::PARAMETER,
                PythonFunction::Call if is_in(mark::MODULE_FILE) => mark::FORWARD,
                PythonFunction::Batch => mark::INPUT,
                PythonFunction::ZeroGrad => mark::ZERO_GRAD,
                _ => 0,
            };
            if is_in(mark::OPTIMIZER_FILE) && function.python != PythonFunction::ZeroGrad {
                marks |= mark::OPTIMIZER;
            }
            // Only the innermost says what it is for: data parallel modules are frames further out.
            if is_in(mark::DISTRIBUTED_FILE) && !self.has_innermost_python {
                marks |= mark::COMMUNICATION;
            }
            self.has_innermost_python = true;
        }
        if marks & mark::BACKWARD != 0 && self.site.marks & mark::FORWARD != 0 {
            self.forward_is_inside = true;
        }
        if function.is_node && self.site.node.is_none() {
            self.site.node = Some(frame.function);
        }
        self.site.marks |= marks;
    }

    fn site(mut self) -> Site {
        if self.forward_is_inside {
            self.site.marks |= mark::RECOMPUTED;
        }
        self.site
    }
}

/// What a file's name says.
fn file_marks(file: &str) -> u32 {
    const PARTS: [(&str, u32); 16] = [
        ("torch/nn/functional.py", mark::FORWARD),
        ("torch/nn/parameter.py", mark::PARAMETER),
        ("torch/nn/init.py", mark::PARAMETER),
        ("torch/utils/data/", mark::INPUT),
        ("transformers/cache_utils.py", mark::KV_CACHE),
        ("torch/serialization.py", mark::CHECKPOINT),
        ("safetensors/", mark::CHECKPOINT),
        ("transformers/core_model_loading.py", mark::CHECKPOINT),
        ("CublasHandlePool", mark::WORKSPACE),
        ("torch/nn/modules/", mark::MODULE_FILE),
        ("torch/optim/", mark::OPTIMIZER_FILE),
        ("bitsandbytes/optim/", mark::OPTIMIZER_FILE),
        ("apex/optimizers/", mark::OPTIMIZER_FILE),
        ("torch/autograd/", mark::AUTOGRAD_FILE),
        ("torch/_tensor.py", mark::AUTOGRAD_FILE),
        ("torch/distributed/", mark::DISTRIBUTED_FILE),
    ];
    let named = PARTS.iter().filter(|(part, _)| file.contains(part));
    let marks = named.fold(0, |marks, (_, mark)| marks | mark);
    if is_python(file) {
        marks | mark::PYTHON
    } else {
        marks
    }
}

/// What a Python function's name says, in the right file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum PythonFunction {
    #[default]
    Other,
    Forward,
    Backward,
    Call,
    ModuleSetup,
    Load,
    Batch,
    ZeroGrad,
}

/// What a function's name says.
#[derive(Debug, Clone, Copy, Default)]
struct FunctionMarks {
    marks: u32,
    python: PythonFunction,
    is_node: bool,
}

/// Parts of the names of functions that fill KV caches. They are known by name, since every library keeps
/// them in files of its own.
const KV_CACHES: [&str; 3] = ["kv_cache", "kvcache", "key_value_cache"];

/// Likewise of functions that read weights: a file's own reader need not be a frame of Python's.
const LOADERS: [&str; 2] = ["safetensors", "weights_iterator"];

impl FunctionMarks {
    fn of(function: &str) -> Self {
        let python = match function {
            "forward" => PythonFunction::Forward,
            "backward" | "_engine_run_backward" => PythonFunction::Backward,
            "_call_impl" | "_wrapped_call_impl" => PythonFunction::Call,
            "__init__" | "_apply" | "to" | "cuda" | "half" | "bfloat16" | "float" | "convert"
            | "to_empty" | "reset_parameters" | "register_buffer" => PythonFunction::ModuleSetup,
            "load_state_dict" | "_load_from_state_dict" | "from_pretrained" => PythonFunction::Load,
            "pin_memory" | "collate_fn" | "default_collate" => PythonFunction::Batch,
            "zero_grad" => PythonFunction::ZeroGrad,
            _ => PythonFunction::Other,
        };
        let mut found = Self {
            python,
            ..Self::default()
        };
        // Python's names have no `::`, and most of C++'s do.
        if !function.contains("::") {
            if KV_CACHES.iter().any(|name| function.contains(name)) {
                found.marks |= mark::KV_CACHE;
            }
            if LOADERS.iter().any(|name| function.contains(name)) {
                found.marks |= mark::CHECKPOINT;
            }
            return found;
        }
        let has = |part: &str| function.contains(part);
        if has("torch::autograd::Engine") || has("torch::autograd::Node::") {
            found.marks |= mark::BACKWARD;
        }
        if has("torch::autograd::AccumulateGrad") {
            found.marks |= mark::BACKWARD | mark::ACCUMULATE;
        }
        if has("getNewWorkspace")
            || has("CUDABlasHandle")
            || has("CUDABlasLt")
            || has("Workspace::Workspace")
        {
            found.marks |= mark::WORKSPACE;
        }
        if has("c10d::") || has("ProcessGroupNCCL") {
            found.marks |= mark::COMMUNICATION;
        }
        found.is_node = node_name(function).is_some();
        if found.is_node {
            found.marks |= mark::BACKWARD;
        }
        found
    }
}

/// `BmmBackward0` of `torch::autograd::generated::BmmBackward0::apply(..)`.
fn node_name(function: &str) -> Option<&str> {
    const GENERATED: &str = "torch::autograd::generated::";
    if function.contains("torch::autograd::PyNode::apply") {
        return Some("PyNode");
    }
    let start = function.find(GENERATED)? + GENERATED.len();
    let rest = &function[start..];
    let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let name = &rest[..end.unwrap_or(rest.len())];
    // `details::` and the like hold functions that nodes call.
    let name = name.split("_apply").next()?;
    name.contains("Backward").then_some(name)
}

fn is_python(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    let ending = name.rsplit_once('.').map(|(_, ending)| ending);
    matches!(ending, Some("py" | "ipynb")) || file.starts_with('<') || file.contains("/ipykernel_")
}

/// Frames between the user's that say nothing.
fn is_python_plumbing(file: &str, function: &str) -> bool {
    const WRAPPERS: [(&str, &[&str]); 5] = [
        (
            "torch/nn/modules/module.py",
            &["_call_impl", "_wrapped_call_impl", "inner"],
        ),
        ("torch/utils/_contextlib.py", &["decorate_context"]),
        (
            "torch/optim/optimizer.py",
            &["wrapper", "profile_hook_step", "_use_grad"],
        ),
        ("torch/optim/lr_scheduler.py", &["wrapper"]),
        ("torch/_dynamo/eval_frame.py", &["_fn", "compile_wrapper"]),
    ];
    if file.starts_with("<frozen ") || file == "<string>" {
        return true;
    }
    WRAPPERS
        .iter()
        .any(|(end, functions)| file.ends_with(end) && functions.contains(&function))
}

/// C++ frames that every allocation has, and those without a name.
fn is_native_plumbing(name: &str) -> bool {
    name.is_empty()
        || [
            "torch::unwind",
            "CapturedTraceback",
            "gather_with_cpp",
            "CUDACachingAllocator",
            "wrap_kernel_functor_unboxed_",
        ]
        .iter()
        .any(|part| name.contains(part))
}

/// A C++ name up to its arguments.
fn without_arguments(name: &str) -> String {
    let anonymous = name.replace("(anonymous namespace)::", "");
    let end = anonymous.find('(').unwrap_or(anonymous.len());
    anonymous[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_names() {
        for (function, name) in [
            (
                "torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)",
                Some("BmmBackward0"),
            ),
            (
                "torch::autograd::generated::DivBackward0_apply_functional(int)",
                Some("DivBackward0"),
            ),
            ("torch::autograd::PyNode::apply(x)", Some("PyNode")),
            ("at::native::bmm(x)", None),
            ("torch::autograd::generated::", None),
            (
                "torch::autograd::generated::details::mul_tensor_backward(x)",
                None,
            ),
        ] {
            assert_eq!(node_name(function), name, "{function}");
        }
    }

    #[test]
    fn native_names_lose_their_arguments() {
        assert_eq!(
            without_arguments("at::(anonymous namespace)::create_out(c10::ArrayRef<long>)"),
            "at::create_out"
        );
    }
}
