//! Random histories of a pool, against a judge that knows only what was handed out.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

pub(super) const BUDGET: u64 = 100;

/// Copies go to the host's memory in whole pieces.
pub(super) const PIECE: u64 = 4;

/// What the outside world sees, counted anew at every step.
pub(super) struct World {
    pub(super) machine: Machine,
    pub(super) sizes: Vec<u64>,
    pinned: Vec<bool>,
    /// In memory, by what jobs did.
    pub(super) resident: Vec<bool>,
    pub(super) jobs: Vec<Job>,
    pub(super) waiting: BTreeMap<Ticket, (ModelId, u64, Client)>,
    pub(super) uses: BTreeMap<Ticket, (ModelId, u64, Client)>,
    /// The use that a request asks more activations for.
    growing: BTreeMap<Ticket, Ticket>,
    /// On a device, the host's share for copies.
    host: Option<u64>,
    /// What each model's copy has, or may have once it is made, of the host's memory.
    pub(super) copies: Vec<u64>,
    /// Blocks that the device's allocator has, by model: what its calls took at the most since they were
    /// given back.
    pub(super) blocks: BTreeMap<usize, u64>,
    /// The same since a release began.
    fresh: BTreeMap<usize, u64>,
    overtaken: BTreeMap<Ticket, u32>,
    /// The budget as it was last seen.
    budget: u64,
    /// What it was last told to be.
    target: u64,
    now: u64,
}

impl World {
    fn new(models: &[(u64, bool, bool)]) -> Self {
        Self::of(None, models)
    }

    /// On a device, if the host has a share for copies.
    pub(super) fn of(host: Option<u64>, models: &[(u64, bool, bool)]) -> Self {
        let mut world = Self {
            machine: host.map_or_else(
                || Machine::new(Bytes(BUDGET)),
                |host| Machine::on_device(Bytes(BUDGET), Bytes(host)),
            ),
            host,
            copies: Vec::new(),
            blocks: BTreeMap::new(),
            fresh: BTreeMap::new(),
            sizes: Vec::new(),
            pinned: Vec::new(),
            resident: Vec::new(),
            jobs: Vec::new(),
            waiting: BTreeMap::new(),
            uses: BTreeMap::new(),
            growing: BTreeMap::new(),
            overtaken: BTreeMap::new(),
            budget: BUDGET,
            target: BUDGET,
            now: 0,
        };
        for &(size, is_pinned, is_awake) in models {
            let machine = &mut world.machine;
            let added = machine.add(Bytes(size), Bytes::ZERO, is_pinned, is_awake, Micros(0));
            if let Ok(added) = added {
                world.sizes.push(size);
                world.pinned.push(is_pinned);
                world.resident.push(added.is_awake);
                let copied = added.in_host.0 / PIECE * PIECE;
                world.copies.push(copied);
                world.machine.copied(added.model, Bytes(copied));
            }
        }
        world.judge();
        world
    }

    fn resident_bytes(&self) -> u64 {
        let present = self.sizes.iter().zip(&self.resident);
        let models: u64 = present.filter(|(_, is)| **is).map(|(size, _)| size).sum();
        // What runs lies in blocks.
        let running = self.running();
        let running = running.iter().map(|(id, &bytes)| {
            let blocks = self.blocks.get(id).copied().unwrap_or(0);
            bytes.saturating_sub(blocks)
        });
        models + running.sum::<u64>() + self.blocks.values().sum::<u64>()
    }

    fn running(&self) -> BTreeMap<usize, u64> {
        let mut running = BTreeMap::new();
        for (id, bytes, _) in self.uses.values() {
            *running.entry(id.0).or_default() += bytes;
        }
        running
    }

    /// Takes blocks for all that runs.
    fn take_blocks(&mut self) {
        if self.host.is_some() {
            for (id, bytes) in self.running() {
                for blocks in [&mut self.blocks, &mut self.fresh] {
                    let blocks = blocks.entry(id).or_default();
                    *blocks = bytes.max(*blocks);
                }
            }
        }
    }

    /// Takes the answers in and judges them.
    fn judge(&mut self) {
        for answer in self.machine.answers() {
            match answer {
                Answer::Granted(ticket) => {
                    let granted = self.waiting.remove(&ticket).unwrap();
                    assert!(
                        self.resident[granted.0.0],
                        "granted a model that is not there"
                    );
                    if let Some(grown) = self.growing.remove(&ticket) {
                        self.uses.get_mut(&grown).unwrap().1 += granted.1;
                    } else {
                        self.uses.insert(ticket, granted);
                    }
                    self.take_blocks();
                    for (_, count) in self.overtaken.range_mut(..ticket) {
                        *count += 1;
                    }
                    self.overtaken.remove(&ticket);
                }
                Answer::Refused(ticket, refusal) => {
                    let (model, bytes, client) = self.waiting.remove(&ticket).unwrap();
                    self.growing.remove(&ticket);
                    self.overtaken.remove(&ticket);
                    self.judge_refusal(model, bytes, client, refusal);
                }
            }
        }
        let budget = self.machine.budget().0;
        assert!(self.resident_bytes() <= budget, "over the budget");
        let in_host: u64 = self.copies.iter().sum();
        assert!(in_host <= self.host.unwrap_or(0), "over the host's share");
        assert_eq!(self.machine.in_host().0, in_host);
        assert!(self.machine.counted().0 <= budget && budget <= BUDGET);
        assert!(budget <= self.budget, "grew by itself");
        // What is given up is given up at once.
        assert_eq!(
            budget,
            self.target.max(self.machine.counted().0).min(self.budget)
        );
        self.budget = budget;
    }

    pub(super) fn aim(&mut self, target: u64) {
        self.machine.aim(Bytes(target), Micros(self.now));
        self.target = target.min(BUDGET);
        self.budget = BUDGET;
        self.judge();
    }

    fn judge_refusal(&self, model: ModelId, bytes: u64, client: Client, refusal: Refusal) {
        let own = || self.uses.values().filter(|(_, _, other)| *other == client);
        if let Refusal::TooLarge { wanted, available } = refusal {
            assert_eq!(wanted.0, self.sizes[model.0] + bytes);
            let stays = |id: usize| self.pinned[id] || own().any(|(used, ..)| used.0 == id);
            let ids = (0..self.sizes.len()).filter(|&id| id != model.0 && stays(id));
            let kept: u64 = ids.map(|id| self.sizes[id]).sum();
            let kept = kept + own().map(|(_, bytes, _)| bytes).sum::<u64>();
            assert_eq!(available.0, BUDGET.saturating_sub(kept));
            assert!(wanted > available);
        }
        if refusal == Refusal::Contended {
            assert!(own().count() > 0);
        }
    }

    pub(super) fn ask(&mut self, model: ModelId, bytes: u64, client: Client) {
        let waits = self.waiting.values().any(|(_, _, other)| *other == client);
        if waits {
            return; // it waits for one thing at a time
        }
        let now = Micros(self.now);
        let ticket = self.machine.ask(model, Bytes(bytes), client, now);
        self.waiting.insert(ticket, (model, bytes, client));
        self.overtaken.insert(ticket, 0);
        self.judge();
    }

    pub(super) fn grow(&mut self, running: Ticket, bytes: u64) {
        let (model, _, client) = self.uses[&running];
        let waits = self.waiting.values().any(|(_, _, other)| *other == client);
        if waits {
            return;
        }
        let now = Micros(self.now);
        let ticket = self.machine.grow(running, Bytes(bytes), now);
        self.waiting.insert(ticket, (model, bytes, client));
        self.growing.insert(ticket, running);
        self.overtaken.insert(ticket, 0);
        self.judge();
    }

    pub(super) fn begin(&mut self) -> bool {
        let job = self.machine.begin(Micros(self.now));
        job.is_some_and(|job| self.begun(job))
    }

    pub(super) fn shed(&mut self, target: u64) -> bool {
        let job = self.machine.shed(Bytes(target), Micros(self.now));
        job.is_some_and(|job| {
            let is_fair = match job {
                Job::Park(id, _) | Job::Spill(id) => !self.is_wanted(id),
                Job::Release => true,
                Job::Wake(_) => false,
            };
            assert!(is_fair, "{job:?}");
            self.begun(job)
        })
    }

    fn is_wanted(&self, id: ModelId) -> bool {
        self.waiting.values().any(|(wanted, ..)| *wanted == id)
    }

    fn begun(&mut self, job: Job) -> bool {
        match job {
            Job::Wake(id) => {
                assert!(!self.resident[id.0], "wakes what is awake");
                // Its pages come while it is woken, so they count from here.
                self.resident[id.0] = true;
            }
            Job::Park(id, in_host) => {
                assert!(self.resident[id.0] && !self.pinned[id.0]);
                let is_used = self.uses.values().any(|(used, ..)| *used == id);
                assert!(!is_used, "parks what is used");
                assert_eq!(self.copies[id.0], 0);
                self.copies[id.0] = in_host.0;
            }
            Job::Spill(id) => {
                assert!(!self.resident[id.0] && self.copies[id.0] > 0);
                assert!(!self.is_wanted(id), "moves on what is waited for");
            }
            Job::Release => {
                assert!(self.host.is_some() && !self.jobs.contains(&job));
                self.fresh = self.running();
            }
        }
        self.jobs.push(job);
        self.judge();
        true
    }

    pub(super) fn finish(&mut self, place: usize, is_done: bool) {
        let job = self.jobs.swap_remove(place);
        let copied = |in_host: Bytes| in_host.0 / PIECE * PIECE;
        // Waking is a thousand times faster than writing.
        let moved = if matches!(job, Job::Wake(_)) {
            10_000
        } else {
            10
        };
        let done = Done {
            is_done,
            moved: Bytes(moved),
            in_host: match job {
                Job::Park(_, in_host) => Bytes(copied(in_host)),
                _ => Bytes::ZERO,
            },
            took: Micros(3),
            now: Micros(self.now),
        };
        match job {
            Job::Wake(id) => {
                self.resident[id.0] = is_done;
                self.copies[id.0] *= u64::from(!is_done);
                self.machine.woken(id, done);
            }
            Job::Park(id, _) => {
                self.resident[id.0] = !is_done;
                self.copies[id.0] = if is_done { done.in_host.0 } else { 0 };
                self.machine.parked(id, done);
            }
            Job::Spill(id) => {
                self.copies[id.0] *= u64::from(!is_done);
                self.machine.spilled(id, done);
            }
            Job::Release => {
                self.blocks = std::mem::take(&mut self.fresh);
                self.machine.released(done.now);
            }
        }
        self.judge();
    }

    pub(super) fn end(&mut self, ticket: Ticket) {
        let (_, _, client) = self.uses[&ticket];
        // A client's use does not end while it waits for more of it.
        let grows = |asked: &Ticket| self.growing.get(asked) == Some(&ticket);
        let waits = |asked: &Ticket| self.waiting[asked].2 == client && grows(asked);
        if self.waiting.keys().any(waits) {
            return;
        }
        self.uses.remove(&ticket);
        self.machine.end(ticket, Bytes::ZERO, Micros(self.now));
        self.judge();
    }

    /// Lets all jobs succeed and everyone who does not wait end, until no request waits.
    pub(super) fn drain(&mut self) {
        for _ in 0..10_000 {
            while self.begin() {}
            if !self.jobs.is_empty() {
                self.finish(0, true);
                continue;
            }
            if self.waiting.is_empty() {
                return;
            }
            let waits = |client| self.waiting.values().any(|(_, _, other)| *other == client);
            let ended = self.uses.iter().find(|(_, (_, _, client))| !waits(*client));
            if let Some(ended) = ended.map(|ended| *ended.0) {
                self.end(ended);
                continue;
            }
            let short = self.machine.short();
            let short = short.expect("all who hold wait, and nothing is being done");
            assert!(self.budget < short.0 && short.0 <= BUDGET);
            self.aim(short.0);
        }
        panic!("somebody waits for ever");
    }
}

proptest! {
    #[test]
    fn no_history_exceeds_the_budget_or_leaves_anybody_waiting(
        host in prop::option::of(0_u64..90),
        models in prop::collection::vec((1_u64..60, prop::bool::weighted(0.15), any::<bool>()), 1..7),
        steps in prop::collection::vec((0_u8..15, any::<prop::sample::Index>(), 0_u64..30, 0_u64..5), 0..120),
    ) {
        let mut world = World::of(host, &models);
        prop_assume!(!world.sizes.is_empty());
        for (what, which, bytes, client) in steps {
            world.now += bytes;
            match what {
                0..=3 => {
                    let model = ModelId(which.index(world.sizes.len()));
                    world.ask(model, bytes, Client(client));
                }
                4 | 5 => {
                    world.begin();
                }
                6 if !world.jobs.is_empty() => {
                    world.finish(which.index(world.jobs.len()), bytes != 0);
                }
                7 | 8 if !world.uses.is_empty() => {
                    let place = which.index(world.uses.len());
                    let ticket = *world.uses.keys().nth(place).unwrap();
                    world.end(ticket);
                }
                9 if !world.waiting.is_empty() => {
                    let place = which.index(world.waiting.len());
                    let ticket = *world.waiting.keys().nth(place).unwrap();
                    world.waiting.remove(&ticket);
                    world.growing.remove(&ticket);
                    world.overtaken.remove(&ticket);
                    world.machine.cancel(ticket);
                    world.judge();
                }
                10 => {
                    world.shed(bytes * 4);
                }
                11 | 12 => {
                    world.aim(bytes * 4);
                    world.shed(bytes * 4);
                }
                13 | 14 if !world.uses.is_empty() => {
                    let place = which.index(world.uses.len());
                    let ticket = *world.uses.keys().nth(place).unwrap();
                    world.grow(ticket, bytes);
                }
                _ => {}
            }
        }
        world.drain();
        prop_assert!(world.machine.statistics().peak.0 <= BUDGET);
        prop_assert!(world.machine.statistics().host_peak.0 <= host.unwrap_or(0));
    }
}

/// A world of models of 30 bytes each, of which three fit.
fn three_of(count: usize) -> World {
    World::new(&vec![(30, false, false); count])
}

impl World {
    /// Uses a model for a moment.
    fn visit(&mut self, model: usize) {
        self.call(model, 0);
    }

    /// Uses a model for a call that takes so much.
    pub(super) fn call(&mut self, model: usize, bytes: u64) {
        self.now += 1000;
        self.ask(ModelId(model), bytes, Client(9));
        self.drain();
        let tickets: Vec<_> = self.uses.keys().copied().collect();
        for ticket in tickets {
            self.end(ticket);
        }
    }
}

#[test]
fn the_model_that_is_used_least_often_is_parked() {
    let mut world = three_of(4);
    for _ in 0..6 {
        for model in [0, 1, 0, 1, 0, 1, 2] {
            world.visit(model);
        }
    }
    // Least recently used would park model 0.
    world.visit(3);
    assert_eq!(world.resident, [true, true, false, true]);
}

#[test]
fn a_model_does_not_stay_only_because_it_was_never_written() {
    let mut models = [(30, false, false); 4];
    models[0].2 = true;
    let mut world = World::new(&models);
    // No request wants the one that was in memory from the beginning; writing it takes longest by far.
    for model in [1, 2, 1, 2, 3] {
        world.visit(model);
    }
    assert_eq!(world.resident, [false, true, true, true]);
}

#[test]
fn hits_pass_a_request_that_waits_for_room_but_not_for_ever() {
    let mut world = three_of(4);
    for model in 0..3 {
        world.ask(ModelId(model), 0, Client(model as u64));
        world.drain();
    }
    world.ask(ModelId(3), 0, Client(7));
    for hit in 0..OVERTAKINGS {
        world.ask(ModelId(0), 0, Client(100 + u64::from(hit)));
        assert_eq!(world.waiting.len(), 1, "hit {hit} has to wait");
    }
    world.ask(ModelId(0), 0, Client(1000));
    assert_eq!(world.waiting.len(), 2);
    assert!(world.overtaken.values().all(|&count| count <= OVERTAKINGS));
    world.drain();
}

#[test]
fn what_cannot_be_parked_is_refused_when_nothing_else_is_in_the_way() {
    let mut world = World::new(&[(60, false, false), (60, false, false)]);
    world.visit(0);
    world.ask(ModelId(1), 0, Client(1));
    assert!(world.begin());
    world.finish(0, false);
    assert!(world.waiting.is_empty() && world.uses.is_empty());
    // Used again, it may be parked again.
    world.visit(0);
    world.visit(1);
    assert_eq!(world.resident, [false, true]);
}

#[test]
fn what_nobody_uses_or_waits_for_steps_aside_and_no_more_than_asked() {
    let models = [(30, false), (20, false), (30, true), (20, false)];
    let models = models.map(|(size, is_pinned)| (size, is_pinned, true));
    let mut world = World::new(&models);
    assert_eq!(world.resident, [true; 4]);
    assert!(!world.shed(100));
    world.ask(ModelId(1), 0, Client(0));
    let shed = |world: &mut World, target| {
        while world.shed(target) {}
        while !world.jobs.is_empty() {
            world.finish(0, true);
        }
    };
    shed(&mut world, 80);
    assert_eq!(world.resident, [true, true, true, false]);
    // The rest is used or pinned.
    shed(&mut world, 0);
    assert_eq!(world.resident, [false, true, true, false]);
    world.drain();
    world.visit(0);
    assert_eq!(world.resident, [true, true, true, false]);
}

#[test]
fn a_budget_that_came_down_is_kept_to_and_who_lacks_it_waits_for_it() {
    let mut world = World::new(&[(30, false, true), (60, false, true)]);
    world.ask(ModelId(0), 10, Client(0));
    world.aim(20);
    // The call and its model stay; the idle one goes and its bytes with it.
    assert_eq!(world.machine.budget(), Bytes(100));
    assert!(world.shed(20));
    world.finish(0, true);
    assert_eq!(world.machine.budget(), Bytes(40));
    world.ask(ModelId(1), 5, Client(1));
    assert_eq!(
        world.waiting.len(),
        1,
        "nothing is refused that only lacks budget"
    );
    assert_eq!(world.machine.short(), Some(Bytes(105)));
    let ticket = *world.uses.keys().next().unwrap();
    world.end(ticket);
    assert_eq!(world.machine.budget(), Bytes(30));
    assert_eq!(world.machine.short(), Some(Bytes(65)));
    world.aim(65);
    world.drain();
    assert_eq!(world.resident, [false, true]);
}

#[test]
fn a_wake_that_fails_is_told_to_its_request_and_its_room_is_free_again() {
    let mut world = World::new(&[(60, false, false)]);
    world.ask(ModelId(0), 10, Client(1));
    assert!(world.begin());
    assert_eq!(world.machine.counted(), Bytes(70));
    world.finish(0, false);
    assert!(world.waiting.is_empty());
    assert_eq!(world.machine.counted(), Bytes::ZERO);
}

#[test]
fn a_use_that_grows_has_others_parked_or_is_refused_and_counts_until_it_ends() {
    let mut world = World::new(&[(30, false, true), (40, false, true)]);
    world.ask(ModelId(0), 5, Client(0));
    let running = *world.uses.keys().next().unwrap();
    world.grow(running, 20);
    assert_eq!(world.machine.counted(), Bytes(95), "there was room");
    world.grow(running, 30);
    world.drain();
    assert_eq!(world.resident, [true, false]);
    assert_eq!(world.machine.counted(), Bytes(85));
    world.grow(running, 16);
    assert!(world.waiting.is_empty(), "refused at once");
    assert_eq!(world.machine.statistics().uses, 1);
    world.end(running);
    assert_eq!(world.machine.counted(), Bytes(30));
}

#[test]
fn two_who_hold_do_not_wait_for_each_other() {
    let mut world = World::new(&[(60, false, false), (40, false, false), (41, false, false)]);
    world.ask(ModelId(0), 0, Client(0));
    world.drain();
    world.ask(ModelId(1), 0, Client(1));
    world.drain();
    // Both fit exactly; a third model does not, beside either.
    world.ask(ModelId(2), 0, Client(1));
    assert_eq!(world.waiting.len(), 1);
    world.ask(ModelId(1), 1, Client(0));
    assert_eq!(world.waiting.len(), 1, "refused at once");
    world.drain();
}

#[test]
fn pinned_models_and_sizes_that_never_fit_are_said_at_once() {
    let mut machine = Machine::new(Bytes(100));
    let large = machine.add(Bytes(90), Bytes(11), false, false, Micros(0));
    let refusal = Refusal::TooLarge {
        wanted: Bytes(101),
        available: Bytes(100),
    };
    assert_eq!(large, Err(refusal));
    machine
        .add(Bytes(60), Bytes(0), true, false, Micros(0))
        .unwrap();
    let beside = machine.add(Bytes(41), Bytes(0), false, false, Micros(0));
    let refusal = Refusal::TooLarge {
        wanted: Bytes(41),
        available: Bytes(40),
    };
    assert_eq!(beside, Err(refusal));
    machine
        .add(Bytes(20), Bytes(15), false, false, Micros(0))
        .unwrap();
    let second = machine.add(Bytes(6), Bytes(0), true, false, Micros(0));
    let refusal = Refusal::TooLarge {
        wanted: Bytes(41),
        available: Bytes(40),
    };
    assert_eq!(second, Err(refusal));
}

#[test]
fn a_model_that_was_taken_out_counts_no_more() {
    let mut world = World::new(&[(60, false, false), (60, false, false)]);
    world.visit(0);
    assert!(world.machine.remove(ModelId(0)));
    assert_eq!(world.machine.counted(), Bytes::ZERO);
    assert!(!world.machine.remove(ModelId(5)));
}
