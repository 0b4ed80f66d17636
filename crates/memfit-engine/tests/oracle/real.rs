//! The real allocator: the driver program, built once a test run, and its answers.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use memfit_engine::allocator::{AddressOrder, Device};

/// The driver program with the library that stands in for CUDA's runtime.
pub(crate) struct Oracle {
    driver: PathBuf,
    runtime: PathBuf,
}

/// The oracle, or why there is none here. Building it takes three seconds, so it is built once.
pub(crate) fn oracle() -> Result<&'static Oracle, &'static str> {
    static ORACLE: OnceLock<Result<Oracle, String>> = OnceLock::new();
    ORACLE.get_or_init(build).as_ref().map_err(String::as_str)
}

/// The oracle, or a line on stderr that says why the test is skipped. With `MEMFIT_ORACLE=required` a test
/// without it fails.
pub(crate) fn oracle_or_skip() -> Option<&'static Oracle> {
    match oracle() {
        Ok(oracle) => Some(oracle),
        Err(reason) => {
            let is_required = std::env::var("MEMFIT_ORACLE").is_ok_and(|it| it == "required");
            assert!(!is_required, "the real allocator is required: {reason}");
            eprintln!("skipped: {reason}");
            None
        }
    }
}

fn build() -> Result<Oracle, String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("the oracle needs Linux on x86-64".into());
    }
    let torch = torch_folder()?;
    let cuda = torch
        .parent()
        .ok_or("torch lies in no folder")?
        .join("nvidia/cu13/include");
    if !torch.join("lib/libc10_cuda.so").exists() || !cuda.exists() {
        return Err(format!("`{}` is no build for CUDA 13", torch.display()));
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle");
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("oracle");
    std::fs::create_dir_all(&out).map_err(|error| error.to_string())?;
    let runtime = out.join("libcudart.so.13");
    let driver = out.join("driver");
    let includes = [sources.join("shim"), torch.join("include"), cuda];
    let includes = includes
        .iter()
        .map(|folder| format!("-I{}", folder.display()));
    let compiler = || {
        let mut command = Command::new("g++");
        command.args(["-std=c++20", "-O1"]).args(includes.clone());
        command
    };
    compile(
        compiler()
            .args(["-fPIC", "-shared", "-Wl,-soname,libcudart.so.13"])
            .arg(format!(
                "-Wl,--version-script={}",
                sources.join("stand_in_runtime.map").display()
            ))
            .arg(sources.join("stand_in_runtime.cpp"))
            .arg("-o")
            .arg(&runtime),
    )?;
    let libraries = torch.join("lib");
    compile(
        compiler()
            .arg(sources.join("driver.cpp"))
            .arg(&runtime)
            .arg(format!("-L{}", libraries.display()))
            .args(["-lc10_cuda", "-lc10"])
            .arg(format!("-Wl,-rpath,{}", libraries.display()))
            .arg("-o")
            .arg(&driver),
    )?;
    Ok(Oracle { driver, runtime })
}

/// Where the interpreter named by the environment has torch 2.15.
fn torch_folder() -> Result<PathBuf, String> {
    let python = ["MEMFIT_PYTHON", "PYO3_PYTHON"]
        .iter()
        .find_map(std::env::var_os)
        .ok_or("neither MEMFIT_PYTHON nor PYO3_PYTHON names an interpreter")?;
    // Finding a package is much faster than importing it.
    let code = "import importlib.metadata, importlib.util; \
                print(importlib.util.find_spec('torch').submodule_search_locations[0]); \
                print(importlib.metadata.version('torch'))";
    let output = Command::new(&python)
        .args(["-c", code])
        .output()
        .map_err(|error| format!("`{}` does not start: {error}", python.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.lines().collect::<Vec<_>>()[..] {
        [folder, version] if version.starts_with("2.15.") => Ok(PathBuf::from(folder)),
        [_, version] => Err(format!("the oracle is torch 2.15, here is {version}")),
        _ => Err(format!("`{}` has no torch", python.display())),
    }
}

fn compile(command: &mut Command) -> Result<(), String> {
    let output = command
        .output()
        .map_err(|error| format!("`g++` does not start: {error}"))?;
    // With a compiler and a wheel the sources must build; anything else is a broken test.
    assert!(
        output.status.success(),
        "the oracle does not build:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

impl Oracle {
    /// What the real allocator answers to a script.
    pub(crate) fn run(&self, settings: &str, device: Device, script: &str) -> String {
        self.run_with(settings, device, script, &[])
    }

    /// Processor time in seconds that allocations and frees take, and their allocated and reserved peaks.
    pub(crate) fn time(&self, settings: &str, device: Device, script: &str) -> (f64, u64, u64) {
        let answer = self.run_with(settings, device, script, &["speed"]);
        let words: Vec<&str> = answer.split_whitespace().collect();
        let [seconds, allocated, reserved] = words[..] else {
            panic!("the driver says {answer}");
        };
        (
            seconds.parse().unwrap(),
            allocated.parse().unwrap(),
            reserved.parse().unwrap(),
        )
    }

    fn run_with(&self, settings: &str, device: Device, script: &str, arguments: &[&str]) -> String {
        let direction = match device.address_order {
            AddressOrder::Ascending => "ascending",
            AddressOrder::Descending => "descending",
        };
        let mut child = Command::new(&self.driver)
            .args([&device.total_bytes.to_string(), direction])
            .args(arguments)
            .env_clear()
            .env("LD_PRELOAD", &self.runtime)
            .env("PYTORCH_CUDA_ALLOC_CONF", settings)
            .env("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        std::thread::scope(|scope| {
            // A driver that stops early closes its end; its answers then tell.
            scope.spawn(move || input.write_all(script.as_bytes()).ok());
            let output = child.wait_with_output().unwrap();
            let mut answer = String::from_utf8(output.stdout).unwrap();
            if !output.status.success() {
                let error = String::from_utf8_lossy(&output.stderr);
                let what = error.lines().find(|line| line.contains("what()"));
                answer.push_str(what.unwrap_or("the driver failed"));
            }
            answer
        })
    }
}
