//! Which of the offloaded parameters are in memory: a room of so many bytes, and a known order of use.
//!
//! Responsible for what comes and what goes when some of them are needed: a pure state machine, which the plan asks
//! what a step would move (`parameters.rs`) and the executor asks what to move. Not responsible for moving
//! bytes, nor for which of them were written to.
//!
//! # Policy
//!
//! What is needed comes at once. Room is made by what is next used farthest in the future (Belady 1966), and what is
//! needed next is fetched ahead, in order, as long as only what is used later than it has to go for it. So many bytes
//! may be ahead of their use and no more: fetching ahead without a limit (the *aggressive* algorithm of Cao, Felten,
//! Karlin and Li 1995) moves more in all, and hides none of it better. The order of use goes round: after its end it
//! begins anew, as steps do.
//!
//! Invariant: what is in memory never exceeds the room, unless what is needed at the same time does alone.

/// What is to be done, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Move {
    /// Its memory goes, once its bytes are written.
    Evict(usize),
    /// It comes, and is waited for.
    Fetch(usize),
    /// It begins to come.
    Ahead(usize),
    /// It began to come before, and is waited for now.
    Await(usize),
}

impl Move {
    /// What is to be done in a word, and the item.
    #[must_use]
    pub const fn told(self) -> (&'static str, usize) {
        match self {
            Self::Evict(item) => ("evict", item),
            Self::Fetch(item) => ("fetch", item),
            Self::Ahead(item) => ("ahead", item),
            Self::Await(item) => ("await", item),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Away,
    Coming,
    Here,
}

/// The room. Items are places in the list of sizes that it was made with.
#[derive(Debug, Clone)]
pub struct Room {
    sizes: Vec<u64>,
    /// Most bytes in memory, or on their way there.
    most_bytes: u64,
    /// Most bytes that are on their way, or came ahead and are not used yet.
    ahead_bytes: u64,
    /// Items in the order of their uses.
    order: Vec<usize>,
    /// Of each item, where it stands in the order; ascending.
    uses: Vec<Vec<usize>>,
    places: Vec<Place>,
    here_bytes: u64,
    /// Place in the order of the latest use.
    cursor: usize,
}

impl Room {
    /// With nothing in it, before the first use. What an order names that is no item is left out.
    #[must_use]
    pub fn new(sizes: Vec<u64>, order: Vec<usize>, room_bytes: u64, ahead_bytes: u64) -> Self {
        let order: Vec<usize> = order.into_iter().filter(|&i| i < sizes.len()).collect();
        let mut uses = vec![Vec::new(); sizes.len()];
        for (place, &item) in order.iter().enumerate() {
            uses[item].push(place);
        }
        Self {
            places: vec![Place::Away; sizes.len()],
            here_bytes: 0,
            cursor: order.len().saturating_sub(1),
            sizes,
            most_bytes: room_bytes,
            ahead_bytes,
            order,
            uses,
        }
    }

    /// Bytes in memory, or on their way there.
    #[must_use]
    pub const fn here_bytes(&self) -> u64 {
        self.here_bytes
    }

    /// Notes that an item is in memory already, no matter what brought it; [`Room::trim`] makes it fit.
    pub fn admit(&mut self, item: usize) {
        if item < self.sizes.len() && self.places[item] == Place::Away {
            self.here_bytes = self.here_bytes.saturating_add(self.sizes[item]);
            self.places[item] = Place::Here;
        }
    }

    /// Has go what is beyond the room.
    pub fn trim(&mut self) -> Vec<Move> {
        let mut moves = Vec::new();
        self.make_room(0, &[], &mut moves);
        moves
    }

    /// Some items are used now, at the same time.
    pub fn need(&mut self, items: &[usize]) -> Vec<Move> {
        let mut moves = Vec::new();
        let mut needed: Vec<usize> = Vec::with_capacity(items.len());
        for &item in items {
            if item < self.sizes.len() && !needed.contains(&item) {
                needed.push(item);
            }
        }
        for &item in &needed {
            self.advance(item);
        }
        let missing = needed.iter().filter(|&&i| self.places[i] == Place::Away);
        let missing_bytes = missing.fold(0u64, |sum, &i| sum.saturating_add(self.sizes[i]));
        self.make_room(missing_bytes, &needed, &mut moves);
        for &item in &needed {
            match self.places[item] {
                Place::Away => {
                    self.here_bytes = self.here_bytes.saturating_add(self.sizes[item]);
                    moves.push(Move::Fetch(item));
                }
                Place::Coming => moves.push(Move::Await(item)),
                Place::Here => continue,
            }
            self.places[item] = Place::Here;
        }
        self.look_ahead(&needed, &mut moves);
        moves
    }

    /// Goes on to the next use of an item, unless its latest use goes on.
    fn advance(&mut self, item: usize) {
        if self.order.get(self.cursor) == Some(&item) {
            return;
        }
        if let Some(distance) = self.distance(item, self.cursor) {
            self.cursor = (self.cursor + distance) % self.order.len();
        }
    }

    /// How many uses after `place` an item is used again, 1 or more; `None` for an item that the order does not name.
    fn distance(&self, item: usize, place: usize) -> Option<usize> {
        let uses = &self.uses[item];
        let next = uses.partition_point(|&at| at <= place);
        let at = uses.get(next).map(|&at| at - place);
        at.or_else(|| uses.first().map(|&at| at + self.order.len() - place))
    }

    /// Evicts until so many more bytes fit, or only what is needed is left.
    fn make_room(&mut self, more: u64, needed: &[usize], moves: &mut Vec<Move>) {
        while self.here_bytes.saturating_add(more) > self.most_bytes {
            let Some(item) = self.farthest(needed, 0, &[]) else {
                return;
            };
            self.evict(item, moves);
        }
    }

    fn evict(&mut self, item: usize, moves: &mut Vec<Move>) {
        self.places[item] = Place::Away;
        self.here_bytes = self.here_bytes.saturating_sub(self.sizes[item]);
        moves.push(Move::Evict(item));
    }

    /// What is in memory, not needed, not chosen yet, and used again farthest in the future, but not before more than
    /// `after` uses. Of equal ones, the last.
    fn farthest(&self, needed: &[usize], after: usize, chosen: &[usize]) -> Option<usize> {
        let there = (0..self.sizes.len()).filter(|&item| {
            let is_free = self.places[item] != Place::Away && self.sizes[item] > 0;
            is_free && !needed.contains(&item) && !chosen.contains(&item)
        });
        let with = there.map(|item| (self.distance(item, self.cursor).unwrap_or(usize::MAX), item));
        let farthest = with.max()?;
        (farthest.0 > after).then_some(farthest.1)
    }

    /// Fetches what is used next, in order, as far as the window goes and while only what is used later has to go
    /// for it.
    fn look_ahead(&mut self, needed: &[usize], moves: &mut Vec<Move>) {
        let coming = (0..self.sizes.len()).filter(|&item| self.places[item] == Place::Coming);
        let mut coming_bytes = coming.fold(0u64, |sum, item| sum.saturating_add(self.sizes[item]));
        for ahead in 1..self.order.len() {
            let item = self.order[(self.cursor + ahead) % self.order.len()];
            if self.places[item] != Place::Away {
                continue;
            }
            coming_bytes = coming_bytes.saturating_add(self.sizes[item]);
            if coming_bytes > self.ahead_bytes {
                return;
            }
            let Some(victims) = self.victims(self.sizes[item], needed, ahead) else {
                return;
            };
            for victim in victims {
                self.evict(victim, moves);
            }
            self.places[item] = Place::Coming;
            self.here_bytes = self.here_bytes.saturating_add(self.sizes[item]);
            moves.push(Move::Ahead(item));
        }
    }

    /// What has to go so that so many more bytes fit, all of it used only after `after` more uses; `None` where that
    /// is not enough.
    fn victims(&self, more: u64, needed: &[usize], after: usize) -> Option<Vec<usize>> {
        let mut victims = Vec::new();
        let mut here = self.here_bytes;
        while here.saturating_add(more) > self.most_bytes {
            let victim = self.farthest(needed, after, &victims)?;
            here = here.saturating_sub(self.sizes[victim]);
            victims.push(victim);
        }
        Some(victims)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type World = (Vec<u64>, Vec<usize>, (u64, u64), Vec<(usize, bool)>);

    /// Sizes, an order, a room and what may come ahead, and what is used: mostly by the order, sometimes not.
    fn worlds() -> impl Strategy<Value = World> {
        let sizes = prop::collection::vec(0u64..9, 1..7);
        let order = prop::collection::vec(0usize..7, 0..12);
        let uses = prop::collection::vec((0usize..7, prop::bool::weighted(0.1)), 0..60);
        (sizes, order, (0u64..30, 0u64..20), uses)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn what_is_used_is_there_and_the_room_is_kept((sizes, order, (room_bytes, ahead_bytes), uses) in worlds()) {
            let mut room = Room::new(sizes.clone(), order.clone(), room_bytes, ahead_bytes);
            // Judged by what the moves say alone: 0 away, 1 coming, 2 here.
            let mut places = vec![0; sizes.len()];
            let mut next = 0;
            for (item, strays) in uses {
                let item = match order.get(next % order.len().max(1)) {
                    Some(&expected) if !strays && expected < sizes.len() => expected,
                    _ => item % sizes.len(),
                };
                next += usize::from(!strays);
                for what in room.need(&[item]) {
                    match what {
                        Move::Evict(i) => {
                            prop_assert!(places[i] != 0 && i != item);
                            places[i] = 0;
                        }
                        Move::Fetch(i) => {
                            prop_assert!(places[i] == 0 && i == item);
                            places[i] = 2;
                        }
                        Move::Ahead(i) => {
                            prop_assert_eq!(places[i], 0);
                            places[i] = 1;
                        }
                        Move::Await(i) => {
                            prop_assert!(places[i] == 1 && i == item);
                            places[i] = 2;
                        }
                    }
                    let here = (0..sizes.len()).filter(|&i| places[i] != 0);
                    let bytes: u64 = here.map(|i| sizes[i]).sum();
                    prop_assert!(bytes <= room_bytes.max(sizes[item]), "{bytes} of {room_bytes}");
                    let coming = (0..sizes.len()).filter(|&i| places[i] == 1);
                    prop_assert!(coming.map(|i| sizes[i]).sum::<u64>() <= ahead_bytes);
                }
                prop_assert_eq!(places[item], 2, "used where it is not");
            }
        }

        /// What is in use cannot go for what comes ahead, so the room is as good as one for an item less without
        /// fetching ahead.
        #[test]
        fn items_of_one_size_are_fetched_as_seldom_as_can_be(
            order in prop::collection::vec(0usize..5, 1..10),
            slots in 2usize..5,
        ) {
            let mut room = Room::new(vec![1; 5], order.clone(), slots as u64, 1);
            let mut fetched = 0;
            let laps = 4;
            for _ in 0..laps {
                for &item in &order {
                    let moves = room.need(&[item]);
                    fetched += moves.iter().filter(|m| matches!(m, Move::Fetch(_) | Move::Ahead(_))).count();
                }
            }
            let uses: Vec<usize> = std::iter::repeat_n(order.clone(), laps).flatten().collect();
            // What came ahead for the lap after the last was no miss of these uses.
            prop_assert!(fetched <= fewest_fetches(&uses, slots - 1) + slots);
        }
    }

    /// By trying every eviction.
    fn fewest_fetches(uses: &[usize], slots: usize) -> usize {
        let mut states = std::collections::BTreeMap::from([(std::collections::BTreeSet::new(), 0)]);
        for &item in uses {
            let mut after = std::collections::BTreeMap::new();
            for (there, fetched) in states {
                let mut reach = |there: std::collections::BTreeSet<usize>, fetched: usize| {
                    let known = after.entry(there).or_insert(fetched);
                    *known = fetched.min(*known);
                };
                if there.contains(&item) {
                    reach(there, fetched);
                    continue;
                }
                let mut with = there.clone();
                with.insert(item);
                if with.len() <= slots {
                    reach(with, fetched + 1);
                    continue;
                }
                for out in there {
                    let mut without = with.clone();
                    without.remove(&out);
                    reach(without, fetched + 1);
                }
            }
            states = after;
        }
        states.into_values().min().unwrap_or(0)
    }

    #[test]
    fn what_comes_next_comes_ahead_in_place_of_what_was_used() {
        let mut room = Room::new(vec![4, 4, 4], vec![0, 1, 2], 8, 4);
        assert_eq!(room.need(&[0]), [Move::Fetch(0), Move::Ahead(1)]);
        // The first is used again after the third.
        assert_eq!(
            room.need(&[1]),
            [Move::Await(1), Move::Evict(0), Move::Ahead(2)]
        );
        assert_eq!(room.need(&[1]), []);
        assert_eq!(
            room.need(&[2]),
            [Move::Await(2), Move::Evict(1), Move::Ahead(0)]
        );
    }

    #[test]
    fn what_is_in_memory_already_is_trimmed_to_the_room() {
        let mut room = Room::new(vec![4, 4, 4], vec![0, 1, 2], 8, 4);
        for item in 0..3 {
            room.admit(item);
        }
        assert_eq!(room.trim(), [Move::Evict(2)]);
        assert_eq!(room.here_bytes(), 8);
    }

    #[test]
    fn what_is_needed_at_the_same_time_comes_even_where_it_is_more_than_the_room() {
        let mut room = Room::new(vec![5, 5, 1], vec![2, 0, 1], 8, 5);
        assert_eq!(room.need(&[2]), [Move::Fetch(2), Move::Ahead(0)]);
        assert_eq!(
            room.need(&[0, 1, 0]),
            [Move::Evict(2), Move::Await(0), Move::Fetch(1)]
        );
        // No such item; but there is less in use again.
        assert_eq!(room.need(&[9]), [Move::Evict(1), Move::Ahead(2)]);
    }
}
