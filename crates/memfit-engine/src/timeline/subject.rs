//! Whose timeline is packed: a device, its lives, and to whom they are counted.
//!
//! Responsible for taking over lives from the explanation's rollback and for naming owners as the
//! explanation does, so that the page and the report say the same. Not responsible for either.
//!
//! Invariant: every life's owner has a name.

use std::collections::HashMap;

use super::Life;
use crate::explain::{Category, History, Judge, NO_STACK, Rounding, Runs, Sites};
use crate::snapshot::{DeviceRecord, Snapshot, StackIndex};

/// Modules of a chain that are named, from the innermost out.
const CHAIN: usize = 3;

/// A device whose picture is made: its lives, and who owns them.
#[derive(Debug, Clone)]
pub struct Subject<'a> {
    pub(super) device: &'a DeviceRecord,
    pub(super) lives: Vec<Life>,
    pub(super) owners: Vec<String>,
}

/// All devices of a snapshot. Owners are a category and a module, or an autograd node.
#[must_use]
pub fn subjects(snapshot: &Snapshot) -> Vec<Subject<'_>> {
    let sites = Sites::of(snapshot);
    let rounding = Rounding::of_settings(&snapshot.settings);
    let devices = snapshot.devices.iter();
    devices
        .map(|device| {
            let history = History::of(device, &rounding);
            let runs = Runs::of(snapshot, device, &sites);
            let judge = Judge {
                snapshot,
                device,
                sites: &sites,
                runs: &runs,
            };
            Subject::explained(device, &history, &judge)
        })
        .collect()
}

impl<'a> Subject<'a> {
    /// A device with its lives; each life's owner is a position in `owners`, the first one if it is none.
    #[must_use]
    pub fn new(device: &'a DeviceRecord, mut lives: Vec<Life>, mut owners: Vec<String>) -> Self {
        if owners.is_empty() {
            owners.push(String::new());
        }
        for life in &mut lives {
            if life.owner as usize >= owners.len() {
                life.owner = 0;
            }
        }
        Self {
            device,
            lives,
            owners,
        }
    }

    fn explained(device: &'a DeviceRecord, history: &History, judge: &Judge<'_>) -> Self {
        let moments = super::moments(device);
        let mut names = Names::default();
        let lives = history
            .allocations
            .iter()
            .map(|allocation| Life {
                address: allocation.address,
                size: allocation.size,
                birth: allocation.start,
                released: allocation.let_go.min(moments),
                end: allocation.end.min(moments),
                stack: allocation.stack,
                owner: names.owner(judge.category(allocation).0, allocation.stack, judge.sites),
            })
            .filter(|life| life.birth < life.end)
            .collect();
        Self::new(device, lives, names.owners)
    }
}

/// Owners numbered as they come.
#[derive(Default)]
struct Names {
    owners: Vec<String>,
    /// Stacks are many and their modules few; texts are made once a stack.
    by_stack: HashMap<(Category, StackIndex), u32>,
    by_name: HashMap<String, u32>,
}

impl Names {
    fn owner(&mut self, category: Category, stack: StackIndex, sites: &Sites<'_>) -> u32 {
        *self.by_stack.entry((category, stack)).or_insert_with(|| {
            let name = format!(
                "{}: {}",
                category.name().replace('_', " "),
                place(stack, sites)
            );
            let next = u32::try_from(self.owners.len()).unwrap_or(0);
            *self.by_name.entry(name).or_insert_with_key(|name| {
                self.owners.push(name.clone());
                next
            })
        })
    }
}

/// The innermost modules of a stack.
fn place(stack: StackIndex, sites: &Sites<'_>) -> String {
    if stack == StackIndex::NONE {
        return NO_STACK.to_owned();
    }
    let chain = sites.module(stack);
    if chain.is_empty() {
        let text = sites.text(stack);
        return text.lines().next().unwrap_or_default().to_owned();
    }
    let modules: Vec<&str> = chain.split(" > ").collect();
    let kept = modules.len().saturating_sub(CHAIN);
    modules[kept..].join(" > ")
}
