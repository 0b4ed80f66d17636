//! The containers of a pickle while it is read.
//!
//! Responsible for holding lists, dicts and what they became: a dict of a stack frame is a number, a list of frames a
//! stack, an event a part of the columns of its trace. Not responsible for when a container is turned
//! (`collect.rs`), for what the keys of a row mean (`rows.rs`), nor for the whole (`assemble.rs`).
//!
//! Invariant: what is held is proportional to what was read.

use std::borrow::Cow;

use super::intern::{SequenceTable, TextTable, low_half};
use super::value::Value;
use super::words;
use super::{
    Action, BlockState, Event, Events, PoolIndex, Pools, Segment, StackIndex, TextIndex, Texts,
};

/// What became of a container. Numbers point into the tables of the [`Containers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Slot {
    /// A list, or a dict not looked at yet, or one that is no row; no body yet when [`NO_BODY`].
    List(u32),
    Dict(u32),
    PlainDict(u32),
    Frame(u32),
    Stack(u32),
    Event(u32),
    Trace(u32),
    Block(u32),
    Segment(u32),
    /// Taken in; nothing is left of it.
    Used,
}

pub(super) const NO_BODY: u32 = u32::MAX;
/// Bodies larger than this go back to the allocator rather than wait for their next use.
const KEPT_VALUES: usize = 4096;

/// An event before its place is known.
pub(super) struct EventRow {
    pub(super) event: Event,
    pub(super) fault: Option<Cow<'static, str>>,
}

/// Takes the place of what cannot be used, so that later events keep their index: an annotation of nothing.
pub(super) const MARK: Event = Event {
    action: Action::Annotate,
    address: 0,
    size: 0,
    stream: 0,
    time_us: 0,
    stack: StackIndex::NONE,
    pool: PoolIndex::DEFAULT,
    label: TextIndex(0),
};

impl Default for EventRow {
    fn default() -> Self {
        Self {
            event: MARK,
            fault: None,
        }
    }
}

impl EventRow {
    pub(super) const fn faulty(fault: &'static str) -> Self {
        Self {
            event: MARK,
            fault: Some(Cow::Borrowed(fault)),
        }
    }
}

/// A block before its place is known.
#[derive(Default)]
pub(super) struct BlockRow {
    /// Missing in torch 2.0: blocks follow each other without a gap.
    pub(super) address: Option<u64>,
    pub(super) size: u64,
    pub(super) requested_size: u64,
    pub(super) state: Option<BlockState>,
    pub(super) stack: StackIndex,
    pub(super) fault: Option<String>,
}

/// A segment, checked.
pub(super) struct SegmentRow {
    /// Device 0 when it does not say.
    pub(super) device: u32,
    /// Missing when it has no place.
    pub(super) segment: Option<Segment>,
    pub(super) faults: Vec<String>,
}

/// Why a container cannot take something in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    NotAList,
    NotADict,
    /// It was turned already.
    Changed,
    /// A table has more entries than numbers count.
    Full,
}

/// The events of one list, with what is wrong in them.
#[derive(Default)]
pub(super) struct Trace {
    pub(super) events: Events,
    /// Event and fault; no more than can be shown.
    pub(super) faults: Vec<(u64, String)>,
    pub(super) fault_count: u64,
}

pub(super) struct Containers {
    pub(super) texts: TextTable,
    pub(super) slots: Vec<Slot>,
    bodies: Vec<Vec<Value>>,
    free_bodies: Vec<u32>,
    /// Capacity of all bodies, in values.
    body_values: usize,
    /// Pairs of numbers, four words each; pair 0 is the empty sequence and stands for nothing.
    pairs: SequenceTable,
    /// `[file, function, line]` by number of frame.
    pub(super) frames: SequenceTable,
    /// Numbers of frames.
    stacks: SequenceTable,
    pub(super) waiting_events: Vec<EventRow>,
    pub(super) free_events: Vec<u32>,
    pub(super) traces: Vec<Trace>,
    /// What the columns of all traces take.
    event_bytes: usize,
    pub(super) blocks: Vec<BlockRow>,
    pub(super) segments: Vec<Option<SegmentRow>>,
    pools: Pools,
    /// By number of pair.
    pool_of_pair: Vec<Option<PoolIndex>>,
    labels: Texts,
    /// By number of text; 0 is not published.
    label_of_text: Vec<u32>,
    numbers: Vec<u32>,
}

impl Containers {
    pub(super) fn new() -> Self {
        Self {
            texts: TextTable::starting_with(words::ALL),
            slots: Vec::new(),
            bodies: Vec::new(),
            free_bodies: Vec::new(),
            body_values: 0,
            pairs: SequenceTable::new(),
            frames: SequenceTable::new(),
            stacks: SequenceTable::new(),
            waiting_events: Vec::new(),
            free_events: Vec::new(),
            traces: Vec::new(),
            event_bytes: 0,
            blocks: Vec::new(),
            segments: Vec::new(),
            pools: Pools::default(),
            pool_of_pair: Vec::new(),
            labels: Texts::default(),
            label_of_text: Vec::new(),
            numbers: Vec::new(),
        }
    }

    pub(super) fn new_list(&mut self) -> Option<Value> {
        self.new_slot(Slot::List(NO_BODY))
    }

    pub(super) fn new_dict(&mut self) -> Option<Value> {
        self.new_slot(Slot::Dict(NO_BODY))
    }

    fn new_slot(&mut self, slot: Slot) -> Option<Value> {
        let number = u32::try_from(self.slots.len()).ok()?;
        self.slots.push(slot);
        Some(Value::Container(number))
    }

    /// The text's number; what is no UTF-8 (Python allows lone surrogates) is replaced.
    pub(super) fn number_of_text(&mut self, bytes: &[u8]) -> Option<u32> {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.texts.number_of(text),
            Err(_) => self.texts.number_of(&String::from_utf8_lossy(bytes)),
        }
    }

    /// The tuple of two numbers.
    pub(super) fn pair(&mut self, first: u64, second: u64) -> Option<Value> {
        let words = [first, first >> 32, second, second >> 32].map(low_half);
        self.pairs.number_of(&words).map(Value::Pair)
    }

    pub(super) fn slot(&self, container: u32) -> Slot {
        self.slots[container as usize]
    }

    pub(super) fn is_list(&self, value: Value) -> bool {
        let slot = value.container().map(|container| self.slot(container));
        matches!(slot, Some(Slot::List(_) | Slot::Trace(_)))
    }

    /// Adds to a body, which is made when there is none.
    pub(super) fn extend(&mut self, body: u32, items: &[Value]) -> Result<u32, Refusal> {
        if body == NO_BODY && items.is_empty() {
            return Ok(NO_BODY);
        }
        let body = if body == NO_BODY {
            self.new_body()?
        } else {
            body
        };
        let values = &mut self.bodies[body as usize];
        let before = values.capacity();
        values.extend_from_slice(items);
        self.body_values += values.capacity() - before;
        Ok(body)
    }

    fn new_body(&mut self) -> Result<u32, Refusal> {
        if let Some(free) = self.free_bodies.pop() {
            return Ok(free);
        }
        pushed(&mut self.bodies, Vec::new()).and_then(|body| {
            if body == NO_BODY {
                Err(Refusal::Full)
            } else {
                Ok(body)
            }
        })
    }

    /// What a list or plain dict holds; it holds nothing after that.
    pub(super) fn take_body(&mut self, container: u32) -> Vec<Value> {
        match std::mem::replace(&mut self.slots[container as usize], Slot::Used) {
            Slot::List(body) | Slot::Dict(body) | Slot::PlainDict(body) if body != NO_BODY => {
                self.free_bodies.push(body);
                let values = std::mem::take(&mut self.bodies[body as usize]);
                self.body_values -= values.capacity();
                values
            }
            _ => Vec::new(),
        }
    }

    /// What a list or plain dict holds, to look at.
    pub(super) fn body(&self, container: u32) -> &[Value] {
        match self.slot(container) {
            Slot::List(body) | Slot::Dict(body) | Slot::PlainDict(body) if body != NO_BODY => {
                &self.bodies[body as usize]
            }
            _ => &[],
        }
    }

    pub(super) fn give_back(&mut self, mut values: Vec<Value>) {
        // `take_body` has just put the number of this body on the list of free ones.
        if let Some(&body) = self.free_bodies.last()
            && values.capacity() <= KEPT_VALUES
        {
            values.clear();
            self.body_values += values.capacity();
            self.bodies[body as usize] = values;
        }
    }

    pub(super) fn is_frame(&self, value: Value) -> bool {
        value
            .container()
            .is_some_and(|c| matches!(self.slot(c), Slot::Frame(_)))
    }

    pub(super) fn is_event(&self, value: Value) -> bool {
        value
            .container()
            .is_some_and(|c| matches!(self.slot(c), Slot::Event(_)))
    }

    pub(super) fn finish_stack(&mut self, list: u32) -> Result<(), Refusal> {
        let values = self.take_body(list);
        let mut numbers = std::mem::take(&mut self.numbers);
        numbers.clear();
        // What is no frame among frames is left out.
        numbers.extend(
            values
                .iter()
                .filter_map(|value| match self.slot(value.container()?) {
                    Slot::Frame(frame) => Some(frame),
                    _ => None,
                }),
        );
        let stack = self.stacks.number_of(&numbers).ok_or(Refusal::Full)?;
        self.numbers = numbers;
        self.slots[list as usize] = Slot::Stack(stack);
        self.give_back(values);
        Ok(())
    }

    /// Puts an event, or a mark in the place of what is none, at the end of a trace.
    pub(super) fn push_event(&mut self, trace: u32, item: Value) {
        let container = item.container();
        let row = match container.map(|container| self.slot(container)) {
            Some(Slot::Event(waiting)) => {
                self.free_events.push(waiting);
                if let Some(container) = container {
                    self.slots[container as usize] = Slot::Used;
                }
                std::mem::take(&mut self.waiting_events[waiting as usize])
            }
            Some(Slot::Used) => EventRow::faulty("it is the same object as an earlier event"),
            _ => EventRow::faulty("it is no dict with an `action`"),
        };
        let trace = &mut self.traces[trace as usize];
        let before = trace.events.held_bytes();
        let at = trace.events.len() as u64;
        let mut fault = row.fault;
        if let Err(event) = trace.events.push(row.event) {
            fault = Some("its device has more than 65,536 streams before it".into());
            let pushed = trace.events.push(Event {
                stream: trace.events.any_stream(),
                ..event
            });
            debug_assert!(pushed.is_ok(), "a known stream always has a number");
        }
        self.event_bytes += trace.events.held_bytes() - before;
        if let Some(fault) = fault {
            trace.fault_count += 1;
            if trace.faults.len() < super::MOST_PROBLEMS {
                trace.faults.push((at, fault.into()));
            }
        }
    }

    /// A trace without events; `None` when there are more than numbers count.
    pub(super) fn new_trace(&mut self) -> Option<u32> {
        pushed(&mut self.traces, Trace::default()).ok()
    }

    pub(super) fn take_trace(&mut self, trace: u32) -> Trace {
        std::mem::take(&mut self.traces[trace as usize])
    }

    pub(super) fn take_segment(&mut self, container: u32) -> Option<SegmentRow> {
        match std::mem::replace(&mut self.slots[container as usize], Slot::Used) {
            Slot::Segment(segment) => self.segments[segment as usize].take(),
            other => {
                self.slots[container as usize] = other;
                None
            }
        }
    }

    /// A block, which is gone after that.
    pub(super) fn take_block(&mut self, value: Value) -> Option<BlockRow> {
        let container = value.container()?;
        let Slot::Block(block) = self.slot(container) else {
            return None;
        };
        self.slots[container as usize] = Slot::Used;
        Some(std::mem::take(&mut self.blocks[block as usize]))
    }

    /// The stack that a value is; none for an empty list, `None` or anything else.
    pub(super) fn stack_of(&self, value: Value) -> StackIndex {
        match value.container().map(|container| self.slot(container)) {
            Some(Slot::Stack(stack)) => StackIndex(stack),
            _ => StackIndex::NONE,
        }
    }

    /// The pool of a pair of numbers; `None` when there are more pools than an index counts.
    pub(super) fn pool_of(&mut self, pair: u32) -> Option<PoolIndex> {
        let at = pair as usize;
        if let Some(&known) = self.pool_of_pair.get(at)
            && known.is_some()
        {
            return known;
        }
        let words = self.pairs.get(pair);
        let [first_low, first_high, second_low, second_high] = *words.first_chunk::<4>()?;
        let join = |low, high| u64::from(high) << 32 | u64::from(low);
        let id = (join(first_low, first_high), join(second_low, second_high));
        let pool = if id == (0, 0) {
            PoolIndex::DEFAULT
        } else {
            // Pairs are distinct, so this one is new.
            self.pools.push_new(id)?
        };
        if at >= self.pool_of_pair.len() {
            self.pool_of_pair.resize(at + 1, None);
        }
        self.pool_of_pair[at] = Some(pool);
        Some(pool)
    }

    /// The text's index in the finished table.
    pub(super) fn publish(&mut self, text: u32) -> TextIndex {
        let at = text as usize;
        if text == words::EMPTY {
            return TextIndex::default();
        }
        if at >= self.label_of_text.len() {
            self.label_of_text.resize(at + 1, 0);
        }
        if self.label_of_text[at] == 0 {
            // Texts are numbered by 32 bits already, so their published ones fit too.
            let index = self.labels.push(self.texts.get(text)).unwrap_or_default();
            self.label_of_text[at] = index.0;
        }
        TextIndex(self.label_of_text[at])
    }

    /// The finished tables; the collection is empty of them after that.
    pub(super) fn tables(&mut self) -> (Texts, super::Stacks, Pools) {
        let frames: Vec<super::Frame> = std::iter::once(super::Frame::default())
            .chain(self.frames.rest().map(|words| super::Frame {
                file: TextIndex(words[0]),
                function: TextIndex(words[1]),
                line: words[2],
            }))
            .collect();
        let mut stacks = super::Stacks::default();
        let mut stack: Vec<super::Frame> = Vec::new();
        for numbers in self.stacks.rest() {
            stack.clear();
            stack.extend(numbers.iter().map(|&number| frames[number as usize]));
            let pushed = stacks.push(&stack);
            debug_assert!(
                pushed.is_some(),
                "as many stacks and frames as were numbered"
            );
        }
        self.stacks = SequenceTable::new();
        (
            std::mem::take(&mut self.labels),
            stacks,
            std::mem::take(&mut self.pools),
        )
    }

    /// Bytes held, in the sizes of the tables.
    pub(super) fn held_bytes(&self) -> u64 {
        let tables = self.slots.capacity() * size_of::<Slot>()
            + self.bodies.capacity() * size_of::<Vec<Value>>()
            + self.free_bodies.capacity() * 4
            + self.body_values * size_of::<Value>()
            + self.waiting_events.capacity() * size_of::<EventRow>()
            + self.free_events.capacity() * 4
            + self.traces.capacity() * size_of::<Trace>()
            + self.event_bytes
            + self.blocks.capacity() * size_of::<BlockRow>()
            + self.segments.capacity() * size_of::<SegmentRow>()
            + self.pool_of_pair.capacity() * 4
            + self.label_of_text.capacity() * 4
            + self.numbers.capacity() * 4;
        let interned = self.texts.held_bytes() * 2
            + self.pairs.held_bytes()
            + self.frames.held_bytes()
            // Written out once more at the end, a frame as three words.
            + self.stacks.held_bytes() * 4;
        tables as u64 + interned
    }
}

pub(super) fn pushed<T>(table: &mut Vec<T>, row: T) -> Result<u32, Refusal> {
    let number = u32::try_from(table.len()).map_err(|_| Refusal::Full)?;
    table.push(row);
    Ok(number)
}
