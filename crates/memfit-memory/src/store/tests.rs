//! The store against a map in memory, and against failing and damaged files.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use proptest::prelude::*;

use super::*;

const OPTIONS: StoreOptions = StoreOptions {
    window_bytes: 1 << 16,
    drop_cache: false,
    allow_memory: true,
};

fn never() -> bool {
    false
}

fn store(options: StoreOptions) -> Store {
    let folder = tempfile::tempdir().unwrap();
    // The folder vanishes here; the open file does not mind.
    Store::create(folder.path(), options).unwrap()
}

/// A store whose file can be read but not written.
fn failing_store() -> Store {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("read-only");
    std::fs::write(&path, "").unwrap();
    let file = std::fs::File::open(&path).unwrap();
    let mut store = store(OPTIONS);
    let inner = Arc::get_mut(&mut store.inner).unwrap();
    let shared = Arc::new(Shared {
        file: StoreFile::over(file, folder.path()),
        options: OPTIONS,
        process: std::process::id(),
        blocks: Mutex::default(),
        work: Condvar::new(),
        done: Condvar::new(),
    });
    let writer = Arc::clone(&shared);
    let idle = std::mem::replace(&mut inner.shared, shared);
    idle.lock().is_closing = true;
    idle.work.notify_all();
    inner
        .threads
        .push(std::thread::spawn(move || writer.work_until_closed()));
    store
}

fn read_back(block: &StoredBlock) -> Vec<u8> {
    let mut target = vec![0; usize::try_from(block.length()).unwrap()];
    block.fetch(&mut target, &mut never).unwrap();
    target
}

/// Memory that waits until it may be used, and tells when it is let go.
struct Gated {
    bytes: Vec<u8>,
    gate: Mutex<Receiver<()>>,
    gone: Arc<AtomicBool>,
}

impl AsRef<[u8]> for Gated {
    fn as_ref(&self) -> &[u8] {
        if std::thread::current().name() == Some("memfit-store") {
            let _sender_gone = self.gate.lock().unwrap().recv();
        }
        &self.bytes
    }
}

impl Drop for Gated {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::SeqCst);
    }
}

fn gated(length: usize) -> (Sender<()>, Arc<AtomicBool>, Source) {
    let (open, gate) = channel();
    let gone = Arc::new(AtomicBool::new(false));
    let source = Gated {
        bytes: vec![7; length],
        gate: Mutex::new(gate),
        gone: Arc::clone(&gone),
    };
    (open, gone, Box::new(source))
}

#[derive(Debug, Clone)]
enum Step {
    Write(usize, u8),
    Settle(usize),
    Fetch(usize),
    Prefetch(usize),
    Wait(usize),
    Forget(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pick = 0_usize..64;
    let step = prop_oneof![
        3 => (0_usize..40_000, any::<u8>()).prop_map(|(length, seed)| Step::Write(length, seed)),
        1 => pick.clone().prop_map(Step::Settle),
        2 => pick.clone().prop_map(Step::Fetch),
        2 => pick.clone().prop_map(Step::Prefetch),
        2 => pick.clone().prop_map(Step::Wait),
        2 => pick.prop_map(Step::Forget),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_history_gives_back_what_a_map_would(steps in steps(), window in 0_u64..100_000, drop_cache: bool) {
        let store = store(StoreOptions { window_bytes: window, drop_cache, ..OPTIONS });
        let mut stored: Vec<(StoredBlock, u64)> = Vec::new();
        let mut twin: HashMap<u64, Vec<u8>> = HashMap::new();
        let mut ahead: HashSet<u64> = HashSet::new();
        let (mut next, mut written, mut settled) = (0_u64, 0, 0);
        for step in steps {
            let at = |pick: usize| (!stored.is_empty()).then(|| pick % stored.len());
            match step {
                Step::Write(length, seed) => {
                    let bytes: Vec<u8> = (0..length).map(|i| seed ^ i.to_le_bytes()[0]).collect();
                    twin.insert(next, bytes.clone());
                    stored.push((store.write(Box::new(bytes), &mut never).unwrap(), next));
                    written += length as u64;
                    next += 1;
                }
                Step::Settle(pick) => {
                    if let Some(at) = at(pick) {
                        stored[at].0.settle(&mut never).unwrap();
                        settled += 1;
                    }
                }
                Step::Fetch(pick) => {
                    if let Some(at) = at(pick) {
                        prop_assert_eq!(&read_back(&stored[at].0), &twin[&stored[at].1]);
                    }
                }
                Step::Prefetch(pick) => {
                    if let Some(at) = at(pick) {
                        let (block, key) = &stored[at];
                        let target = vec![0_u8; twin[key].len()];
                        let begun = block.prefetch(Box::new(target), &mut never);
                        prop_assert_eq!(begun.is_err(), !ahead.insert(*key));
                    }
                }
                Step::Wait(pick) => {
                    if let Some(at) = at(pick) {
                        let (block, key) = &stored[at];
                        let waited = block.wait(&mut never);
                        prop_assert_eq!(waited.is_ok(), ahead.remove(key));
                        if let Ok(mut target) = waited {
                            prop_assert_eq!(target.as_mut().as_mut(), twin[key].as_slice());
                        }
                    }
                }
                Step::Forget(pick) => {
                    if let Some(at) = at(pick) {
                        let (_, key) = stored.swap_remove(at);
                        twin.remove(&key);
                    }
                }
            }
        }
        for (block, key) in &stored {
            prop_assert_eq!(&read_back(block), &twin[key]);
        }
        let statistics = store.statistics();
        prop_assert!(statistics.bytes_written <= written);
        prop_assert!(settled == 0 || statistics.peak_in_flight_bytes <= written.max(1) * 2);
        drop(stored);
        prop_assert_eq!(store.inner.shared.lock().blocks_left(), (0, 0, 0));
    }
}

#[test]
fn no_more_than_the_window_goes_out_at_a_time() {
    let store = store(OPTIONS);
    let blocks: Vec<_> = (0..50_u8)
        .map(|i| store.write(Box::new(vec![i; 20_000]), &mut never).unwrap())
        .collect();
    for (block, i) in blocks.iter().zip(0_u8..) {
        assert_eq!(read_back(block), vec![i; 20_000]);
    }
    let statistics = store.statistics();
    assert!(statistics.peak_in_flight_bytes <= 1 << 16);
    assert_eq!(statistics.bytes_written, 1_000_000);
    assert_eq!(statistics.bytes_read, 1_000_000);
    assert!(statistics.seconds_busy > 0.0);
}

#[test]
fn a_full_window_waits_and_can_be_interrupted() {
    let store = store(OPTIONS);
    let (open, _, source) = gated(60_000);
    let first = store.write(source, &mut never).unwrap();
    let mut asked = 0;
    let second = store.write(Box::new(vec![1_u8; 60_000]), &mut || {
        asked += 1;
        asked == 2
    });
    assert_eq!(second.err(), Some(StoreError::Interrupted));
    assert!(
        store.statistics().seconds_waited == 0.0,
        "an interrupted wait is not counted"
    );
    open.send(()).unwrap();
    drop(
        store
            .write(Box::new(vec![1_u8; 60_000]), &mut never)
            .unwrap(),
    );
    assert_eq!(read_back(&first), vec![7; 60_000]);
}

#[test]
fn dropping_a_block_waits_for_the_transfer_under_way() {
    let store = store(OPTIONS);
    let (open, gone, source) = gated(100);
    let block = store.write(source, &mut never).unwrap();
    while !store.inner.shared.lock().is_under_way(block.id) {
        std::thread::yield_now();
    }
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        open.send(()).unwrap();
    });
    drop(block);
    assert!(
        gone.load(Ordering::SeqCst),
        "memory was let go while a thread used it"
    );
    opener.join().unwrap();
}

#[test]
fn dropping_a_block_whose_transfer_has_not_begun_does_not_wait() {
    let store = store(StoreOptions {
        window_bytes: 1 << 20,
        ..OPTIONS
    });
    let busy: Vec<_> = (0..THREADS).map(|_| gated(10)).collect();
    let (opens, running): (Vec<_>, Vec<_>) = busy
        .into_iter()
        .map(|(open, _, source)| (open, store.write(source, &mut never).unwrap()))
        .unzip();
    let (_never_opened, gone, source) = gated(10);
    drop(store.write(source, &mut never).unwrap());
    assert!(gone.load(Ordering::SeqCst));
    for open in opens {
        open.send(()).unwrap();
    }
    for block in &running {
        block.settle(&mut never).unwrap();
    }
}

#[test]
fn a_failed_write_is_told_every_time() {
    let store = failing_store();
    let block = store.write(Box::new(vec![1_u8; 5000]), &mut never).unwrap();
    let first = block.settle(&mut never).unwrap_err();
    assert!(
        first
            .to_string()
            .starts_with("writing 4.9 KiB of offloaded tensors in"),
        "{first}"
    );
    assert_eq!(block.settle(&mut never), Err(first.clone()));
    assert_eq!(block.fetch(&mut [0; 5000], &mut never), Err(first.clone()));
    assert_eq!(
        block.prefetch(Box::new(vec![0; 5000]), &mut never),
        Err(first)
    );
    assert_eq!(store.statistics().bytes_written, 0);
}

#[test]
fn damage_is_told_by_fetch_and_by_wait() {
    let store = store(OPTIONS);
    let block = store.write(Box::new(vec![1_u8; 5000]), &mut never).unwrap();
    block.settle(&mut never).unwrap();
    store
        .inner
        .shared
        .file
        .handle()
        .write_all_at(&[9], 4000)
        .unwrap();
    let fetched = block.fetch(&mut [0; 5000], &mut never).unwrap_err();
    assert!(
        matches!(fetched, StoreError::Changed { length: 5000, .. }),
        "{fetched}"
    );
    block.prefetch(Box::new(vec![0; 5000]), &mut never).unwrap();
    assert_eq!(block.wait(&mut never).err(), Some(fetched));
}

#[test]
fn memory_of_another_length_is_refused() {
    let store = store(OPTIONS);
    let block = store.write(Box::new(vec![1_u8; 10]), &mut never).unwrap();
    let refused = StoreError::Length {
        stored: 10,
        given: 11,
    };
    assert_eq!(block.fetch(&mut [0; 11], &mut never), Err(refused.clone()));
    assert_eq!(
        block.prefetch(Box::new(vec![0; 11]), &mut never),
        Err(refused)
    );
}

#[test]
fn room_in_the_file_is_used_again() {
    let store = store(OPTIONS);
    for i in 0..20_u8 {
        let block = store.write(Box::new(vec![i; 50_000]), &mut never).unwrap();
        assert_eq!(read_back(&block), vec![i; 50_000]);
    }
    assert_eq!(store.statistics().file_bytes, 53_248); // 13 pages
}

#[test]
fn a_file_that_was_long_once_gives_its_room_back() {
    let store = store(OPTIONS);
    let write = |i: u8| store.write(Box::new(vec![i; 40_960]), &mut never).unwrap();
    let length = || store.inner.shared.file.handle().metadata().unwrap().len();
    let many: Vec<StoredBlock> = (0..10).map(write).collect();
    assert!(many.iter().all(|block| block.settle(&mut never).is_ok()));
    drop(many);
    assert_eq!(length(), 409_600, "the next step may need it");
    for i in 0..20 {
        let two = [write(i), write(i + 1)];
        let back = two.each_ref().map(read_back);
        assert_eq!(back, [vec![i; 40_960], vec![i + 1; 40_960]]);
    }
    assert_eq!(length(), 81_920);
}

#[test]
fn blocks_outlive_their_store() {
    let store = store(OPTIONS);
    let block = store.write(Box::new(vec![3_u8; 100]), &mut never).unwrap();
    drop(store);
    assert_eq!(read_back(&block), vec![3; 100]);
}
