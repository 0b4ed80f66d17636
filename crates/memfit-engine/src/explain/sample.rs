//! A plain caching allocator that records what it does, for tests: it knows the truth at every event.
//!
//! Follows the rules that PyTorch's allocator has for rounding, pools, best fit, splitting, merging,
//! deferred frees, releasing and expandable segments, with a list of blocks and a scan.

use super::peak::Totals;
use crate::bytes::Bytes;
use crate::snapshot::{
    Action, Block, BlockState, DeviceRecord, Event, Events, Frame, PoolIndex, Segment, Snapshot,
    StackIndex, TextIndex,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Unmapped,
    Free,
    Allocated,
    Awaiting,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    address: u64,
    size: u64,
    requested: u64,
    state: State,
    stack: StackIndex,
}

#[derive(Debug, Clone)]
struct Space {
    stream: u64,
    pool: PoolIndex,
    is_small: bool,
    is_expandable: bool,
    pieces: Vec<Piece>,
}

/// What is alive: address, block bytes, requested bytes, held by a tensor, stack.
pub(super) type Alive = Vec<(u64, u64, u64, bool, StackIndex)>;

/// An allocator with its recording.
#[derive(Debug, Default)]
pub(super) struct Machine {
    spaces: Vec<Space>,
    next_address: u64,
    pub(super) is_expandable: bool,
    pub(super) max_split: Option<u64>,
    /// The private pool of what is asked for from now on.
    pub(super) pool: PoolIndex,
    /// Events of older versions do not name their pool.
    pub(super) hides_pools: bool,
    pub(super) events: Vec<Event>,
    /// At every state.
    pub(super) truth: Vec<(Totals, Alive)>,
    pub(super) snapshot: Snapshot,
}

const MIB: u64 = 1 << 20;

impl Machine {
    pub(super) fn new() -> Self {
        let mut machine = Self {
            next_address: 1 << 40,
            ..Self::default()
        };
        machine.remember();
        machine
    }

    /// A stack, innermost frame first, of `file:line function` each.
    pub(super) fn stack(&mut self, frames: &[&str]) -> StackIndex {
        let frames: Vec<Frame> = frames
            .iter()
            .map(|text| {
                let (place, function) = text.split_once(' ').unwrap();
                let (file, line) = place.rsplit_once(':').unwrap_or((place, "0"));
                Frame {
                    file: self.snapshot.texts.push(file).unwrap(),
                    function: self.snapshot.texts.push(function).unwrap(),
                    line: line.parse().unwrap(),
                }
            })
            .collect();
        self.snapshot.stacks.push(&frames).unwrap()
    }

    pub(super) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for piece in self.spaces.iter().flat_map(|space| &space.pieces) {
            let size = Bytes(piece.size);
            if piece.state == State::Allocated {
                totals.allocated_bytes += size;
            }
            if matches!(piece.state, State::Allocated | State::Awaiting) {
                totals.active_bytes += size;
            }
            if piece.state != State::Unmapped {
                totals.reserved_bytes += size;
            }
        }
        totals
    }

    fn alive(&self) -> Alive {
        let pieces = self.spaces.iter().flat_map(|space| &space.pieces);
        let mut alive: Alive = pieces
            .filter(|piece| matches!(piece.state, State::Allocated | State::Awaiting))
            .map(|it| {
                let held = it.state == State::Allocated;
                (it.address, it.size, it.requested, held, it.stack)
            })
            .collect();
        alive.sort_unstable();
        alive
    }

    fn remember(&mut self) {
        self.truth.push((self.totals(), self.alive()));
    }

    pub(super) fn record(&mut self, action: Action, address: u64, size: u64, stack: StackIndex) {
        let spaces = self.spaces.iter().filter(|it| !it.pieces.is_empty());
        // Spaces are made in address order, and what is given back is recorded before it is forgotten.
        let mut homes = spaces.map(|it| (it.pieces[0].address, it.stream, it.pool));
        let home = homes.rfind(|&(start, ..)| start <= address);
        let pool = match action {
            _ if self.hides_pools => PoolIndex::DEFAULT,
            Action::OutOfMemory => self.pool,
            _ => home.map_or(PoolIndex::DEFAULT, |(.., pool)| pool),
        };
        self.events.push(Event {
            action,
            address,
            size,
            stream: home.map_or(0, |(_, stream, _)| stream),
            time_us: 1000 + self.events.len() as u64,
            stack,
            pool,
            label: TextIndex::default(),
        });
        self.remember();
    }

    pub(super) fn malloc(&mut self, requested: u64, stream: u64, stack: StackIndex) -> u64 {
        let size = requested.max(1).next_multiple_of(512);
        let is_small = size <= MIB;
        let (space, piece) = self
            .best_fit(size, stream, is_small)
            .unwrap_or_else(|| self.take_more(size, stream, is_small, stack));
        let max_split = self.max_split.unwrap_or(u64::MAX);
        let fine = is_small || self.spaces[space].is_expandable;
        let pieces = &mut self.spaces[space].pieces;
        let free = pieces[piece];
        let rest = free.size - size;
        let split = if fine {
            rest >= 512
        } else {
            size < max_split && rest > MIB
        };
        let taken = if split { size } else { free.size };
        pieces[piece] = Piece {
            address: free.address,
            size: taken,
            requested,
            state: State::Allocated,
            stack,
        };
        if taken < free.size {
            let rest = Piece {
                address: free.address + taken,
                size: free.size - taken,
                ..free
            };
            pieces.insert(piece + 1, rest);
        }
        self.record(Action::Alloc, free.address, requested, stack);
        free.address
    }

    fn best_fit(&self, size: u64, stream: u64, is_small: bool) -> Option<(usize, usize)> {
        let max_split = self.max_split.unwrap_or(u64::MAX);
        let mut best = None;
        for (s, space) in self.spaces.iter().enumerate() {
            if (space.stream, space.is_small, space.pool) != (stream, is_small, self.pool) {
                continue;
            }
            for (p, piece) in space.pieces.iter().enumerate() {
                if piece.state == State::Free && piece.size >= size {
                    let key = (piece.size, piece.address, s, p);
                    best = Some(best.map_or(key, |best| key.min(best)));
                }
            }
        }
        let (found, _, s, p) = best?;
        if !self.is_expandable
            && ((size < max_split && found >= max_split)
                || (size >= max_split && found >= size + 20 * MIB))
        {
            return None;
        }
        Some((s, p))
    }

    fn take_more(
        &mut self,
        size: u64,
        stream: u64,
        is_small: bool,
        stack: StackIndex,
    ) -> (usize, usize) {
        if self.is_expandable {
            return self.map_more(size, stream, is_small, stack);
        }
        let segment = match size {
            _ if is_small => 2 * MIB,
            _ if size < 10 * MIB => 20 * MIB,
            _ => size.next_multiple_of(2 * MIB),
        };
        let address = self.next_address;
        // Neighbouring segments must not merge.
        self.next_address += segment;
        self.spaces.push(Space {
            stream,
            pool: self.pool,
            is_small,
            is_expandable: false,
            pieces: vec![Piece {
                address,
                size: segment,
                requested: 0,
                state: State::Free,
                stack,
            }],
        });
        self.record(Action::SegmentAlloc, address, segment, stack);
        (self.spaces.len() - 1, 0)
    }

    fn map_more(
        &mut self,
        size: u64,
        stream: u64,
        is_small: bool,
        stack: StackIndex,
    ) -> (usize, usize) {
        let page = if is_small { 2 * MIB } else { 20 * MIB };
        let known = self.spaces.iter().position(|it| {
            it.is_expandable && (it.stream, it.is_small, it.pool) == (stream, is_small, self.pool)
        });
        let s = known.unwrap_or_else(|| {
            let address = self.next_address;
            self.next_address += 1 << 36;
            self.spaces.push(Space {
                stream,
                pool: self.pool,
                is_small,
                is_expandable: true,
                pieces: vec![Piece {
                    address,
                    size: 1 << 36,
                    requested: 0,
                    state: State::Unmapped,
                    stack,
                }],
            });
            self.spaces.len() - 1
        });
        let pieces = &self.spaces[s].pieces;
        let free_before = |p: usize| match p.checked_sub(1).map(|before| &pieces[before]) {
            Some(before) if before.state == State::Free => before.size,
            _ => 0,
        };
        let p = (0..pieces.len())
            .find(|&p| {
                pieces[p].state == State::Unmapped && free_before(p) + pieces[p].size >= size
            })
            .unwrap();
        let mapped = (size - free_before(p)).next_multiple_of(page);
        let unmapped = pieces[p];
        let pieces = &mut self.spaces[s].pieces;
        pieces[p] = Piece {
            size: mapped,
            state: State::Free,
            ..unmapped
        };
        if mapped < unmapped.size {
            let rest = Piece {
                address: unmapped.address + mapped,
                size: unmapped.size - mapped,
                ..unmapped
            };
            pieces.insert(p + 1, rest);
        }
        let start = merge(pieces, p);
        self.record(Action::SegmentMap, unmapped.address, mapped, stack);
        (s, start)
    }

    /// Lets a block go; `later` leaves it waiting for another stream.
    pub(super) fn free(&mut self, address: u64, later: bool) {
        let (s, p) = self.find(address);
        let requested = self.spaces[s].pieces[p].requested;
        self.spaces[s].pieces[p].state = State::Awaiting;
        self.record(Action::FreeRequested, address, requested, StackIndex::NONE);
        if !later {
            self.complete(address);
        }
    }

    pub(super) fn complete(&mut self, address: u64) {
        let (s, p) = self.find(address);
        let requested = self.spaces[s].pieces[p].requested;
        self.spaces[s].pieces[p].state = State::Free;
        merge(&mut self.spaces[s].pieces, p);
        self.record(Action::FreeCompleted, address, requested, StackIndex::NONE);
    }

    fn find(&self, address: u64) -> (usize, usize) {
        let spaces = self.spaces.iter().enumerate();
        spaces
            .flat_map(|(s, it)| it.pieces.iter().enumerate().map(move |(p, it)| (s, p, it)))
            .find(|(_, _, piece)| piece.address == address)
            .map(|(s, p, _)| (s, p))
            .unwrap()
    }

    /// Gives back what is wholly free.
    pub(super) fn empty_cache(&mut self) {
        for s in (0..self.spaces.len()).rev() {
            if self.spaces[s].is_expandable {
                self.unmap_free_pages(s);
                continue;
            }
            let pieces = &self.spaces[s].pieces;
            if let [only] = pieces[..]
                && only.state == State::Free
            {
                self.spaces[s].pieces[0].state = State::Unmapped;
                self.record(
                    Action::SegmentFree,
                    only.address,
                    only.size,
                    StackIndex::NONE,
                );
                self.spaces.remove(s);
            }
        }
    }

    fn unmap_free_pages(&mut self, s: usize) {
        let page = if self.spaces[s].is_small {
            2 * MIB
        } else {
            20 * MIB
        };
        let origin = self.spaces[s].pieces[0].address;
        let mut p = 0;
        while p < self.spaces[s].pieces.len() {
            let piece = self.spaces[s].pieces[p];
            p += 1;
            let start = origin + (piece.address - origin).next_multiple_of(page);
            let end = origin + (piece.address + piece.size - origin) / page * page;
            if piece.state != State::Free || start >= end {
                continue;
            }
            let parts = [
                (piece.address, start, State::Free),
                (start, end, State::Unmapped),
                (end, piece.address + piece.size, State::Free),
            ];
            let parts: Vec<Piece> = parts
                .into_iter()
                .filter(|(start, end, _)| start < end)
                .map(|(start, end, state)| Piece {
                    address: start,
                    size: end - start,
                    state,
                    ..piece
                })
                .collect();
            let pieces = &mut self.spaces[s].pieces;
            p += parts.len() - 1;
            let at = pieces.iter().position(|it| it.address == piece.address);
            pieces.splice(at.unwrap()..=at.unwrap(), parts);
            self.record(Action::SegmentUnmap, start, end - start, StackIndex::NONE);
            // Unmapped runs that touch are one.
            let pieces = &mut self.spaces[s].pieces;
            let mut i = 1;
            while i < pieces.len() {
                if (pieces[i - 1].state, pieces[i].state) == (State::Unmapped, State::Unmapped) {
                    pieces[i - 1].size += pieces[i].size;
                    pieces.remove(i);
                    p = p.min(i);
                } else {
                    i += 1;
                }
            }
        }
    }

    /// The device as a snapshot has it, with only the events from `cut` on.
    pub(super) fn device(&self, cut: usize) -> DeviceRecord {
        let mut events = Events::default();
        for &event in &self.events[cut..] {
            events.push(event).unwrap();
        }
        let mut segments: Vec<Segment> = Vec::new();
        for space in &self.spaces {
            let mut open = false;
            for piece in &space.pieces {
                let state = match piece.state {
                    State::Unmapped => {
                        open = false;
                        continue;
                    }
                    State::Free => BlockState::Inactive,
                    State::Allocated => BlockState::Allocated,
                    State::Awaiting => BlockState::AwaitingFree,
                };
                if !open {
                    segments.push(Segment {
                        address: piece.address,
                        total_size: 0,
                        stream: space.stream,
                        is_small: space.is_small,
                        is_expandable: space.is_expandable,
                        pool: space.pool,
                        stack: StackIndex::NONE,
                        blocks: Vec::new(),
                    });
                    open = true;
                }
                let segment = segments.last_mut().unwrap();
                segment.total_size += piece.size;
                segment.blocks.push(Block {
                    address: piece.address,
                    size: piece.size,
                    requested_size: piece.requested,
                    state,
                    stack: piece.stack,
                });
            }
        }
        segments.sort_by_key(|segment| segment.address);
        DeviceRecord {
            index: 0,
            segments,
            events,
        }
    }
}

/// Merges a free piece with the free pieces beside it; returns where it is now.
fn merge(pieces: &mut Vec<Piece>, mut p: usize) -> usize {
    if pieces
        .get(p + 1)
        .is_some_and(|next| next.state == State::Free)
    {
        pieces[p].size += pieces[p + 1].size;
        pieces.remove(p + 1);
    }
    if p > 0 && pieces[p - 1].state == State::Free {
        pieces[p - 1].size += pieces[p].size;
        pieces.remove(p);
        p -= 1;
    }
    p
}
