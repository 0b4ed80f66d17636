//! Unused bytes of private pools: those of CUDA graphs and of `torch.cuda.MemPool`.
//!
//! Responsible for counting and naming them. A request is served from its own pool alone, and a pool gives
//! segments back only once nothing needs it: its unused bytes are neither cache nor fragmentation.

use std::collections::BTreeMap;

use super::life::Allocation;
use super::moment::Filled;
use crate::bytes::Bytes;
use crate::snapshot::{PoolIndex, Pools};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A private pool that holds bytes in no block.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct PrivatePool {
    /// Its id as PyTorch writes it, such as `(0, 1)`.
    pub pool: String,
    /// Reserved by it, in no block.
    pub inactive_bytes: Bytes,
}

/// Whether a request of the pool `own` can have nothing of a segment.
pub(super) fn is_foreign(filled: &Filled<'_>, own: PoolIndex) -> bool {
    filled.region.pool != PoolIndex::DEFAULT && filled.region.pool != own
}

/// The private pools other than `own` with bytes that no block for which `counts` holds covers, by id.
pub(super) fn inactive(
    filled: &[Filled<'_>],
    pools: &Pools,
    own: PoolIndex,
    counts: impl Fn(&Allocation) -> bool,
) -> Vec<PrivatePool> {
    let mut by_id: BTreeMap<(u64, u64), Bytes> = BTreeMap::new();
    for it in filled.iter().filter(|it| is_foreign(it, own)) {
        *by_id.entry(pools.id(it.region.pool)).or_default() += Bytes(it.unheld_bytes(&counts));
    }
    by_id
        .into_iter()
        .filter(|(_, bytes)| *bytes > Bytes::ZERO)
        .map(|((first, second), inactive_bytes)| PrivatePool {
            pool: format!("({first}, {second})"),
            inactive_bytes,
        })
        .collect()
}

/// Bytes of all of them.
pub(super) fn total(pools: &[PrivatePool]) -> Bytes {
    pools.iter().map(|it| it.inactive_bytes).sum()
}

/// A clause that names them, to be put behind another; empty where there are none.
pub(super) fn clause(pools: &[PrivatePool]) -> String {
    let Some((first, others)) = pools.split_first() else {
        return String::new();
    };
    let others = others
        .iter()
        .map(|it| format!(", {} in {}", it.inactive_bytes, it.pool));
    format!(
        "; {} are in the private pool {}{}: neither usable nor releasable",
        first.inactive_bytes,
        first.pool,
        others.collect::<String>()
    )
}
