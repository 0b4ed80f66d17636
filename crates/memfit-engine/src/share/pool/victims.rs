//! Which idle models to park.
//!
//! Responsible for the set that frees enough at the least loss. Not responsible for what a loss is
//! (`habits.rs`).

/// Up to so many candidates all sets are looked at; a pool seldom has more awake and idle ones.
const ALL_SETS: usize = 16;

/// A model that could be parked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    /// What parking it frees.
    pub(super) bytes: u64,
    /// What parking it costs: seconds of moving by second until it is used again.
    pub(super) loss: f64,
}

/// The places of the candidates to park to free `shortage` bytes, in order; `None` where all are too few.
pub(super) fn choose(candidates: &[Candidate], shortage: u64) -> Option<Vec<usize>> {
    let all: u64 = total(candidates.iter().map(|one| one.bytes));
    if all < shortage {
        return None;
    }
    if candidates.len() <= ALL_SETS {
        Some(best(candidates, shortage))
    } else {
        Some(greedy(candidates, shortage))
    }
}

/// The best of all sets; of equals the one that frees less, then the one of earlier candidates.
fn best(candidates: &[Candidate], shortage: u64) -> Vec<usize> {
    let members = |set: u32| (0..candidates.len()).filter(move |&place| set >> place & 1 == 1);
    let mut found: Option<(f64, u64, u32)> = None;
    for set in 0..1_u32 << candidates.len() {
        let bytes = total(members(set).map(|place| candidates[place].bytes));
        if bytes < shortage {
            continue;
        }
        let loss: f64 = members(set).map(|place| candidates[place].loss).sum();
        let is_better = found.is_none_or(|(least, fewest, _)| {
            loss.total_cmp(&least).then(bytes.cmp(&fewest)).is_lt()
        });
        if is_better {
            found = Some((loss, bytes, set));
        }
    }
    found.map_or_else(Vec::new, |(_, _, set)| members(set).collect())
}

/// The least loss by byte first, until it is enough; then those that turned out not to be needed stay.
fn greedy(candidates: &[Candidate], shortage: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    #[expect(
        clippy::cast_precision_loss,
        reason = "an order needs no more than 53 bits"
    )]
    let by_byte = |place: usize| candidates[place].loss / candidates[place].bytes.max(1) as f64;
    order.sort_by(|&a, &b| by_byte(a).total_cmp(&by_byte(b)));
    let mut chosen = Vec::new();
    let mut bytes = 0_u64;
    for place in order {
        if bytes >= shortage {
            break;
        }
        bytes = bytes.saturating_add(candidates[place].bytes);
        chosen.push(place);
    }
    chosen.sort_by(|&a, &b| candidates[b].loss.total_cmp(&candidates[a].loss));
    chosen.retain(|&place| {
        let is_needed = bytes - candidates[place].bytes < shortage;
        if !is_needed {
            bytes -= candidates[place].bytes;
        }
        is_needed
    });
    chosen.sort_unstable();
    chosen
}

fn total(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::super::naive;
    use super::*;
    use proptest::prelude::*;

    fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
        let one = (0_u64..20, 0_u32..50).prop_map(|(bytes, loss)| Candidate {
            bytes,
            loss: f64::from(loss) / 4.0,
        });
        prop::collection::vec(one, 0..9)
    }

    proptest! {
        #[test]
        fn no_set_that_is_enough_loses_less(candidates in candidates(), shortage in 0_u64..100) {
            let least = naive::least_loss(&candidates, shortage);
            let chosen = choose(&candidates, shortage);
            prop_assert_eq!(chosen.is_some(), least.is_some());
            if let (Some(chosen), Some(least)) = (chosen, least) {
                let bytes: u64 = chosen.iter().map(|&place| candidates[place].bytes).sum();
                let loss: f64 = chosen.iter().map(|&place| candidates[place].loss).sum();
                prop_assert!(bytes >= shortage);
                prop_assert!((loss - least).abs() < 1e-9);
            }
        }

        #[test]
        fn among_many_no_model_is_parked_without_need(
            candidates in candidates(), percent in 0_u64..=100
        ) {
            let bytes: u64 = candidates.iter().map(|one| one.bytes).sum();
            let shortage = bytes * percent / 100;
            let chosen = greedy(&candidates, shortage);
            let freed: u64 = chosen.iter().map(|&place| candidates[place].bytes).sum();
            prop_assert!(freed >= shortage);
            for &place in &chosen {
                prop_assert!(freed - candidates[place].bytes < shortage);
            }
        }
    }

    #[test]
    fn enough_is_found_among_many() {
        let many = vec![
            Candidate {
                bytes: 3,
                loss: 1.0
            };
            40
        ];
        assert_eq!(choose(&many, 7), Some(vec![0, 1, 2]));
        assert_eq!(choose(&many, 121), None);
    }
}
