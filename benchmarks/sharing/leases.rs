//! Lease requests by the million, from processes that are killed, judged from outside.
//!
//!     cargo run --release --package memfit --example lease_load -- \
//!         run --requests 1000000 --restart-ms 2000 --full-ms 300
//!
//! With `--restart-ms` the broker is killed and started again so often, with `--full-ms` its disk is full for
//! so long, as long as not, by turns (its files may not grow).
//!
//! Twelve workers take leases, hold them and give them back. The judge is a file with a place for each
//! worker: under its lock a worker writes what it holds right after it was granted, and sums what all
//! hold; under the same lock the conductor kills a worker and clears its place. So a sum above the
//! capacity is an overshoot, whatever the broker believes. A worker clears its place before it
//! gives back. Other modes: `broker` is the program's own `memfit broker`, `worker` one worker, `latency`
//! times bare messages.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    missing_docs,
    reason = "a benchmark that cannot go on has failed"
)]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfit::lease::{Client, LeaseError, LeaseRequest};
use memfit::{Host, HostError, HostErrorKind, Pruning, Script, Settings, Streams};
use memfit_engine::cost::DeviceProfile;
use memfit_engine::plan::{Asked, Plan, PlanRequest};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};

const CAPACITY: u64 = 1000;
const WORKERS: usize = 12;
/// A worker's place in the judge's file: held bytes, requests, lost leases, overshoots seen.
const PLACE_BYTES: u64 = 32;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rest = arguments.get(1..).unwrap_or_default();
    match arguments.first().map(String::as_str) {
        Some("broker") => broker(),
        Some("worker") => worker(rest),
        Some("latency") => latency(rest),
        Some("run") => run(rest),
        _ => println!(
            "run [--requests N] [--kill-ms M] [--restart-ms M] [--full-ms M] | latency SOCKET COUNT PAUSE_US"
        ),
    }
}

fn option(arguments: &[String], name: &str, default: u64) -> u64 {
    let place = arguments.iter().position(|argument| argument == name);
    place.map_or(default, |place| arguments[place + 1].parse().unwrap())
}

/// The judge's file.
struct Judge {
    file: File,
}

impl Judge {
    fn open(path: &Path) -> Self {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        Self {
            file: file.unwrap(),
        }
    }

    fn locked<T>(&self, work: impl FnOnce() -> T) -> T {
        flock(&self.file, FlockOperation::LockExclusive).unwrap();
        let result = work();
        flock(&self.file, FlockOperation::Unlock).unwrap();
        result
    }

    fn get(&self, worker: usize, field: u64) -> u64 {
        let mut bytes = [0; 8];
        let at = worker as u64 * PLACE_BYTES + field * 8;
        self.file
            .read_exact_at(&mut bytes, at)
            .map_or(0, |()| u64::from_le_bytes(bytes))
    }

    fn set(&self, worker: usize, field: u64, value: u64) {
        let at = worker as u64 * PLACE_BYTES + field * 8;
        self.file.write_all_at(&value.to_le_bytes(), at).unwrap();
    }

    fn sum(&self, field: u64) -> u64 {
        (0..WORKERS).map(|worker| self.get(worker, field)).sum()
    }
}

/// xorshift; seeded, so that runs can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// `worker SOCKET JUDGE PLACE SEED`: until killed.
fn worker(arguments: &[String]) {
    let judge = Judge::open(Path::new(&arguments[1]));
    let place: usize = arguments[2].parse().unwrap();
    let mut random = Random(arguments[3].parse::<u64>().unwrap() | 1);
    let mut client = None;
    loop {
        let Some(connected) = &client else {
            client = Client::connect(Path::new(&arguments[0]), "worker").ok();
            continue;
        };
        judge.set(place, 1, judge.get(place, 1) + 1);
        let bytes = 1 + random.below(CAPACITY / 4);
        let request = LeaseRequest {
            claims: BTreeMap::from([("host".to_owned(), bytes)]),
            priority: i8::try_from(random.below(3)).unwrap(),
            wait: Some(Duration::from_millis(random.below(3) * 100)),
            ..LeaseRequest::default()
        };
        match connected.acquire(&request, &mut |_| true) {
            Ok(held) => {
                judge.locked(|| {
                    judge.set(place, 0, bytes);
                    if judge.sum(0) > CAPACITY {
                        judge.set(place, 3, judge.get(place, 3) + 1);
                    }
                });
                std::thread::sleep(Duration::from_micros(random.below(300)));
                if !matches!(connected.held(held.lease), Ok(Some(_))) {
                    judge.set(place, 2, judge.get(place, 2) + 1);
                }
                judge.locked(|| judge.set(place, 0, 0));
                connected.release(held.lease, &mut |_| true).unwrap();
            }
            Err(LeaseError::Refused(_)) => {}
            Err(_) => client = None,
        }
    }
}

struct Conductor {
    folder: PathBuf,
    program: Vec<String>,
    judge: Judge,
}

impl Conductor {
    fn socket(&self) -> PathBuf {
        self.folder.join("broker.sock")
    }

    fn start_broker(&self) -> Child {
        let child = Command::new(&self.program[0])
            .args(&self.program[1..])
            .args([
                "broker",
                "--quiet",
                "--memory",
                &format!("host={CAPACITY}"),
                "--socket",
            ])
            .arg(self.socket())
            .stderr(
                File::options()
                    .create(true)
                    .append(true)
                    .open(self.folder.join("broker.log"))
                    .unwrap(),
            )
            .spawn();
        child.unwrap()
    }

    fn start_worker(&self, place: usize, seed: u64) -> Child {
        let child = Command::new(std::env::current_exe().unwrap())
            .arg("worker")
            .arg(self.socket())
            .arg(self.folder.join("judge"))
            .args([place.to_string(), seed.to_string()])
            .stdin(Stdio::null())
            .spawn();
        child.unwrap()
    }

    fn client(&self) -> Client {
        let start = Instant::now();
        loop {
            match Client::connect(&self.socket(), "conductor") {
                Ok(client) => return client,
                Err(error) => assert!(start.elapsed() < Duration::from_secs(60), "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills a worker so that the judge never counts what a dead one held.
    fn kill(&self, worker: &mut Child, place: usize) {
        self.judge.locked(|| {
            worker.kill().unwrap();
            assert_eq!(
                worker.wait().unwrap().signal(),
                Some(9),
                "a worker ended by itself"
            );
            self.judge.set(place, 0, 0);
        });
    }
}

/// Lets no file of a process grow, or all.
fn fill_the_disk(process: &Child, is_full: bool) {
    let limit = Rlimit {
        current: is_full.then_some(0),
        maximum: None,
    };
    let pid = Pid::from_child(process);
    prlimit(Some(pid), Resource::Fsize, limit).unwrap();
}

/// Time until the broker shows nothing of a dead worker.
fn reclaimed(client: &Client, pid: u32) -> Duration {
    let start = Instant::now();
    loop {
        let status = client.status().unwrap();
        if status.leases.iter().all(|lease| lease.pid != pid) {
            return start.elapsed();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn run(arguments: &[String]) {
    let requests = option(arguments, "--requests", 100_000);
    let kill = Duration::from_millis(option(arguments, "--kill-ms", 100));
    let restart = option(arguments, "--restart-ms", 0);
    let full = option(arguments, "--full-ms", 0);
    let folder = std::env::temp_dir().join(format!("memfit-leases-{}", std::process::id()));
    std::fs::DirBuilder::new().create(&folder).unwrap();
    std::fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let program = std::env::var("MEMFIT_PROGRAM").ok();
    let own = std::env::current_exe().unwrap().display().to_string();
    let program = program.map_or(vec![own], |text| {
        text.split(' ').map(str::to_owned).collect()
    });
    let conductor = Conductor {
        judge: Judge::open(&folder.join("judge")),
        folder,
        program,
    };
    conductor.judge.set(WORKERS, 0, 0);
    let mut broker = conductor.start_broker();
    let mut client = conductor.client();
    let mut random = Random(88_172_645_463_325_252);
    let mut workers: Vec<Child> = (0..WORKERS)
        .map(|place| conductor.start_worker(place, 7 + place as u64))
        .collect();
    let (start, mut last_restart, mut last_fill) = (Instant::now(), Instant::now(), Instant::now());
    let (mut kills, mut restarts, mut slowest) = (0_u64, 0_u64, Duration::ZERO);
    let (mut fills, mut is_full) = (0_u64, false);
    while conductor.judge.sum(1) < requests {
        std::thread::sleep(kill);
        if restart > 0 && last_restart.elapsed() > Duration::from_millis(restart) {
            broker.kill().unwrap();
            broker.wait().unwrap();
            broker = conductor.start_broker();
            client = conductor.client();
            (restarts, last_restart, is_full) = (restarts + 1, Instant::now(), false);
        }
        if full > 0 && last_fill.elapsed() > Duration::from_millis(full) {
            (is_full, last_fill) = (!is_full, Instant::now());
            fill_the_disk(&broker, is_full);
            fills += u64::from(is_full);
        }
        let place = usize::try_from(random.below(WORKERS as u64)).unwrap();
        let pid = workers[place].id();
        conductor.kill(&mut workers[place], place);
        slowest = slowest.max(reclaimed(&client, pid));
        kills += 1;
        workers[place] = conductor.start_worker(place, 1000 + kills);
    }
    let seconds = start.elapsed().as_secs_f64();
    fill_the_disk(&broker, false);
    for (place, worker) in workers.iter_mut().enumerate() {
        conductor.kill(worker, place);
    }
    std::thread::sleep(Duration::from_secs(1));
    let status = client.status().unwrap();
    let report = json!({
        "requests": conductor.judge.sum(1), "seconds": seconds, "workers": WORKERS, "kills": kills,
        "restarts": restarts, "full_disks": fills, "overshoots": conductor.judge.sum(3), "lost_leases": conductor.judge.sum(2),
        "slowest_reclaim_seconds": slowest.as_secs_f64(),
        "granted_bytes_at_the_end": status.devices[0].granted_bytes, "leases_at_the_end": status.leases.len(),
    });
    broker.kill().unwrap();
    broker.wait().unwrap();
    std::fs::remove_dir_all(&conductor.folder).unwrap();
    println!("{report:#}");
}

/// `latency SOCKET COUNT PAUSE_US`: one client's bare round trips, microseconds.
fn latency(arguments: &[String]) {
    let count: usize = arguments[1].parse().unwrap();
    let pause = Duration::from_micros(arguments[2].parse().unwrap());
    let mut stream = UnixStream::connect(&arguments[0]).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap());
    let mut ask = |text: &str| {
        let start = Instant::now();
        stream.write_all(text.as_bytes()).unwrap();
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        (start.elapsed(), line)
    };
    ask("{\"hello\":{\"version\":1,\"name\":\"latency\"}}\n");
    let mut times = Vec::with_capacity(count * 3);
    for _ in 0..count {
        let (time, line) =
            ask("{\"reserve\":{\"request\":1,\"claims\":{\"host\":1},\"wait_ms\":0}}\n");
        times.push(time);
        let reply: serde_json::Value = serde_json::from_str(&line).unwrap();
        let lease = reply["granted"]["lease"].as_u64().unwrap();
        let commit = format!("{{\"commit\":{{\"request\":2,\"lease\":{lease},\"revision\":1}}}}\n");
        times.push(ask(&commit).0);
        times.push(
            ask(&format!(
                "{{\"release\":{{\"request\":3,\"lease\":{lease}}}}}\n"
            ))
            .0,
        );
        std::thread::sleep(pause);
    }
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 1000].as_secs_f64() * 1e6;
    println!(
        "{}",
        json!({ "count": times.len(), "p50_us": at(500), "p90_us": at(900), "p99_us": at(990), "worst_us": at(1000) })
    );
}

/// `memfit broker`, which asks nothing of a host.
struct NoHost;

fn no<T>() -> Result<T, HostError> {
    Err(HostError::new(
        HostErrorKind::Internal,
        "the benchmark has no host",
    ))
}

impl Host for NoHost {
    fn insist_on_weights(&mut self) -> Result<(), HostError> {
        no()
    }
    fn build(&mut self, _: &str, _: &Settings, _: Option<&str>) -> Result<(), HostError> {
        no()
    }
    fn capture(&mut self, _: &str, _: &Settings, _: Option<&str>) -> Result<Vec<u8>, HostError> {
        no()
    }
    fn alternatives(
        &mut self,
        _: &str,
        _: &Settings,
        _: Option<&str>,
        _: &[u8],
        _: &[Asked],
    ) -> Result<Vec<u8>, HostError> {
        no()
    }
    fn op_seconds(&mut self, _: &str, _: &Settings, _: &[u8]) -> Result<Value, HostError> {
        no()
    }
    fn device_profile(&mut self, _: &str, _: Option<&Path>) -> Result<Value, HostError> {
        no()
    }
    fn overhead_bytes(&mut self, _: &str) -> Result<u64, HostError> {
        no()
    }
    fn examine(&mut self, _: Option<&str>) -> Result<Value, HostError> {
        no()
    }
    fn profile_path(&mut self, _: &str) -> Result<PathBuf, HostError> {
        no()
    }
    fn calibrate(&mut self, _: &str, _: f64, _: Option<&Path>) -> Result<String, HostError> {
        no()
    }
    fn prune(&mut self, _: &str, _: &Settings, _: &Pruning) -> Result<Value, HostError> {
        no()
    }
    fn verify(&mut self, _: &str, _: &Settings, _: &Plan) -> Result<Value, HostError> {
        no()
    }
    fn verify_compiled(
        &mut self,
        _: &str,
        _: &Settings,
        _: &[u8],
        _: u64,
        _: &PlanRequest,
    ) -> Result<Value, HostError> {
        no()
    }
    fn offer(&mut self, _: &str, _: &str, _: Option<&DeviceProfile>) -> Result<Value, HostError> {
        no()
    }
    fn run_script(&mut self, _: &Script) -> Result<Value, HostError> {
        no()
    }
    fn interrupted(&mut self) -> bool {
        false
    }
}

fn broker() {
    let arguments = std::env::args_os().skip(1);
    let arguments = std::iter::once(OsString::from("memfit")).chain(arguments);
    let (mut stdout, mut stderr) = (std::io::stdout(), std::io::stderr());
    let streams = Streams::process(&mut stdout, &mut stderr);
    assert_eq!(memfit::run(arguments, &mut NoHost, streams), 0);
}
