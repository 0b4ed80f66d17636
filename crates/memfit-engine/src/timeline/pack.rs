//! A snapshot's timeline in a given number of bytes.
//!
//! Responsible for the sections that the page reads and for what gives way when they are too large: columns are
//! halved, then lives listed one by one are dropped from the least important up, then stacks lose their outer frames.
//! Totals, the peak and what was dropped are always there. Not responsible for HTML.
//!
//! Invariant: the sections together never exceed the budget, unless the budget is below what the
//! summary alone takes.

use std::cmp::Reverse;

use super::coding::{Writer, deflated};
use super::columns::{self, Columns, Grid, LARGEST, Peak, capped};
use super::head::{
    AnnotationHead, DeviceHead, GridHead, Head, ListHead, MomentHead, OwnerHead, RefusalHead,
};
use super::lives::{Life, Lives};
use super::segments::{self, SegmentLife};
use super::select::{self, Ranked, Reason};
use super::texts::{self, StackNumbers};
use super::{Moment, Subject};
use crate::snapshot::{Annotation, DeviceRecord, Snapshot};

/// Bands that are drawn apart; everybody else is one more.
const BANDS: usize = 11;
/// Columns over the whole trace, before any budget.
const COLUMNS: u32 = 1 << 16;
/// Moments around the peak and around refused requests that are shown one by one.
const DETAIL: u32 = 1 << 12;
/// Refused requests with such detail.
const DETAILS: usize = 3;
/// Allocations listed one by one, before any budget: what a page draws without stutter.
const LIVES: usize = 150_000;
/// Segments, or stages of those that grow, likewise.
const SEGMENTS: usize = 30_000;
/// Devices; PyTorch counts at most 128, and a process rarely uses more than 8.
const DEVICES: usize = 16;
/// Owners listed by name, shared by the devices.
const OWNERS: usize = 400;
/// Annotations and refused requests of a device.
const MARKS: usize = 400;
/// Characters of a name.
const NAME: usize = 160;

/// The sections of a page, each a zlib stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// JSON: what the other sections hold, and the summary.
    pub head: Vec<u8>,
    /// One for each device of the summary.
    pub devices: Vec<PackedDevice>,
}

impl Packed {
    /// Bytes of all sections.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let sections = |device: &PackedDevice| {
            let PackedDevice {
                columns,
                lives,
                segments,
                texts,
            } = device;
            columns.len() + lives.len() + segments.len() + texts.len()
        };
        self.head.len() + self.devices.iter().map(sections).sum::<usize>()
    }
}

/// The sections of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedDevice {
    /// Totals and bands over time.
    pub columns: Vec<u8>,
    /// Allocations one by one.
    pub lives: Vec<u8>,
    /// Segments over time.
    pub segments: Vec<u8>,
    /// JSON: strings, frames and stacks.
    pub texts: Vec<u8>,
}

/// Packs the timelines of devices into at most so many bytes.
#[must_use]
pub fn pack(snapshot: &Snapshot, subjects: &[Subject<'_>], budget: usize) -> Packed {
    let mut told: Vec<&Subject<'_>> = subjects.iter().collect();
    told.sort_by_key(|subject| (Reverse(subject.device.events.len()), subject.device.index));
    told.truncate(DEVICES);
    told.sort_by_key(|subject| subject.device.index);
    let devices_untold = subjects.len() - told.len();
    let pictures: Vec<Picture<'_>> = told
        .into_iter()
        .map(|subject| Picture::new(snapshot, subject))
        .collect();
    // Every device gets its part by events, and something even when it has none.
    let weight = |picture: &Picture<'_>| u64::from(picture.lives.moments) + 10_000;
    let weights: u64 = pictures.iter().map(weight).sum();
    let mut names = OWNERS / pictures.len().max(1);
    loop {
        // The summary is written last and must fit too: measured with everything else at nothing.
        let least = assemble(&pictures, names, devices_untold, |_| 0);
        let rest = budget.saturating_sub(least.bytes() + least.head.len() / 8);
        let share = |picture: &Picture<'_>| {
            let share = u128::try_from(rest).unwrap_or(0) * u128::from(weight(picture));
            usize::try_from(share / u128::from(weights.max(1))).unwrap_or(0)
        };
        let packed = assemble(&pictures, names, devices_untold, share);
        if packed.bytes() <= budget || names == 0 {
            return packed;
        }
        names /= 2;
    }
}

fn assemble(
    pictures: &[Picture<'_>],
    names: usize,
    devices_untold: usize,
    share: impl Fn(&Picture<'_>) -> usize,
) -> Packed {
    let (heads, devices) = pictures
        .iter()
        .map(|picture| picture.packed(names, share(picture)))
        .unzip();
    let head = Head {
        schema_version: 1,
        devices: heads,
        devices_untold,
    };
    Packed {
        head: deflated(&serde_json::to_vec(&head).unwrap_or_default()),
        devices,
    }
}

/// Everything about a device, before any of it is dropped.
struct Picture<'a> {
    snapshot: &'a Snapshot,
    device: &'a DeviceRecord,
    owners: &'a [String],
    lives: Lives<'a>,
    segments: Vec<SegmentLife>,
    peak: Peak,
    /// Owners by importance, and the place of each in that order.
    order: Vec<u32>,
    places: Vec<u32>,
    /// Owners with a band of their own, and one more for everybody else.
    bands: usize,
    columns: Columns,
    details: Vec<Columns>,
    annotations: Vec<(Moment, &'a Annotation)>,
    /// The chosen moments.
    totals: Vec<MomentHead>,
    ranked: Vec<u32>,
    ranked_segments: Vec<u32>,
}

impl<'a> Picture<'a> {
    fn new(snapshot: &'a Snapshot, subject: &'a Subject<'a>) -> Self {
        let Subject { device, owners, .. } = subject;
        let lives = Lives::new(&subject.lives, super::moments(subject.device));
        let segments = segments::of(device);
        let peak = columns::peak(&lives, owners.len());
        let mut order: Vec<u32> = (0..).take(owners.len()).collect();
        order.retain(|&owner| peak.highest[owner as usize] > 0);
        order.sort_by_key(|&owner| {
            let at_peak = peak.owners[owner as usize].0;
            (
                Reverse(at_peak),
                Reverse(peak.highest[owner as usize]),
                owner,
            )
        });
        let mut places = vec![u32::MAX; owners.len()];
        let mut band = vec![0; owners.len()];
        let named = order.len().min(BANDS);
        band.fill(u8::try_from(named).unwrap_or(u8::MAX));
        for (place, &owner) in (0..).zip(&order) {
            places[owner as usize] = place;
            if let Ok(number) = u8::try_from(place)
                && usize::from(number) < named
            {
                band[owner as usize] = number;
            }
        }
        let bands = named + 1;
        let sweep = |grid| Columns::sweep(&lives, &segments, &band, bands, grid);
        let columns = sweep(Grid::whole(lives.moments, COLUMNS));
        let refusals = select::refusals(device)
            .into_iter()
            .map(|refusal| refusal.0);
        let mut details: Vec<Columns> = Vec::new();
        if columns.grid.width > 1 {
            for moment in std::iter::once(peak.moment).chain(refusals.take(DETAILS)) {
                let first = moment.saturating_sub(DETAIL / 2);
                if details
                    .iter()
                    .all(|other| other.grid.first.abs_diff(first) > DETAIL / 4)
                {
                    let count = DETAIL.min(lives.moments - first);
                    details.push(sweep(Grid {
                        first,
                        width: 1,
                        count,
                    }));
                }
            }
        }
        let annotations = placed(&snapshot.annotations, device);
        let chosen = select::moments(device, &annotations, peak.moment, lives.moments);
        let ranked = select::ranked(lives.all, &chosen, peak.moment, LIVES);
        let ranked_segments = select::ranked(&segments, &chosen, peak.moment, SEGMENTS);
        let totals = chosen
            .into_iter()
            .map(|chosen| totals(chosen, &lives, &segments))
            .collect();
        Self {
            snapshot,
            device,
            owners,
            lives,
            segments,
            peak,
            order,
            places,
            bands,
            columns,
            details,
            annotations,
            totals,
            ranked,
            ranked_segments,
        }
    }

    /// The peak is always among the chosen moments.
    fn peak_place(&self) -> usize {
        self.totals
            .partition_point(|totals| totals.moment < self.peak.moment)
    }

    fn packed(&self, names: usize, budget: usize) -> (DeviceHead, PackedDevice) {
        let mut rest = budget;
        let (grids, columns) = self.fit_columns(rest / 4);
        rest = rest.saturating_sub(columns.len());
        let mut numbers = StackNumbers::default();
        let owners = self.owners(names, &mut numbers);
        let refusals = self.refusals(&mut numbers);
        let (segment_count, segment_unit, segments) =
            fit(&self.ranked_segments, rest / 8, |listed| {
                write_segments(&self.segments, listed)
            });
        rest = rest.saturating_sub(segments.len());
        let (life_count, life_unit, lives) = fit(&self.ranked, rest * 3 / 5, |listed| {
            self.write_lives(listed, &mut StackNumbers::default())
        });
        rest = rest.saturating_sub(lives.len());
        // Once more with the numbers that owners and refused requests have taken.
        let listed = &self.ranked[..life_count];
        let (lives, life_unit) = if life_count == 0 {
            (lives, life_unit)
        } else {
            let (writer, unit) = self.write_lives(listed, &mut numbers);
            (writer.deflated(), unit)
        };
        let texts = texts::fit(self.snapshot, &numbers, rest);
        let listed_segments = &self.ranked_segments[..segment_count];
        let events = &self.device.events;
        let time = |position: usize| events.get(position).map_or(0, |event| event.time_us);
        let head = DeviceHead {
            index: self.device.index,
            events: events.len(),
            moments: self.lives.moments,
            first_time_us: time(0).min(LARGEST),
            last_time_us: time(events.len().saturating_sub(1)).min(LARGEST),
            peak: self.listed(&self.totals[self.peak_place()], listed, listed_segments),
            owners_untold: self.order.len() - owners.len(),
            owners,
            bands: self.bands - 1,
            chosen: self
                .totals
                .iter()
                .map(|totals| self.listed(totals, listed, listed_segments))
                .collect(),
            refusals_untold: select::refusals(self.device).len() - refusals.len(),
            refusals,
            annotations: self.annotations(),
            annotations_untold: self.annotations.len().saturating_sub(MARKS),
            grids,
            lives: ListHead {
                listed: life_count,
                total: self.lives.all.len(),
                unit: life_unit,
            },
            segments: ListHead {
                listed: segment_count,
                total: self.segments.len(),
                unit: segment_unit,
            },
            stacks: texts.stacks,
            stacks_untold: numbers.count() - texts.stacks,
        };
        let sections = PackedDevice {
            columns,
            lives,
            segments,
            texts: texts.bytes,
        };
        (head, sections)
    }

    /// The narrowest columns that fit, with the details while there is room for them.
    fn fit_columns(&self, budget: usize) -> (Vec<GridHead>, Vec<u8>) {
        let mut whole = self.columns.clone();
        let mut details = self.details.as_slice();
        while whole.grid.count as usize > budget.max(64) {
            whole = whole.halved();
        }
        loop {
            let mut writer = Writer::default();
            let grids: Vec<GridHead> = std::iter::once(&whole)
                .chain(details)
                .map(|columns| self.write_columns(columns, &mut writer))
                .collect();
            let bytes = writer.deflated();
            if bytes.len() <= budget || (whole.grid.count <= 64 && details.is_empty()) {
                return (grids, bytes);
            }
            if whole.grid.count > 1 << 13 || details.is_empty() {
                whole = whole.halved();
            } else {
                details = &details[..details.len() - 1];
            }
        }
    }

    fn write_columns(&self, columns: &Columns, writer: &mut Writer) -> GridHead {
        let Columns {
            grid,
            at,
            allocated,
            active,
            reserved,
            bands,
        } = columns;
        let all = [allocated, active, reserved].into_iter().chain(bands);
        let unit = unit(all.flatten().copied());
        let starts =
            (0..grid.count).map(|c| u64::from(grid.first) + u64::from(c) * u64::from(grid.width));
        writer.plain(
            starts
                .zip(at)
                .map(|(start, &at)| u64::from(at).saturating_sub(start)),
        );
        let events = &self.device.events;
        // A moment's time is that of the event it follows.
        writer.differences(at.iter().map(|&at| {
            let event = events.get((at as usize).saturating_sub(1));
            event.map_or(0, |event| event.time_us.min(LARGEST))
        }));
        // The last band is what remains of the total.
        let named = &bands[..bands.len() - 1];
        for column in [allocated, active, reserved].into_iter().chain(named) {
            writer.differences(column.iter().map(|bytes| bytes / unit));
        }
        GridHead {
            first: grid.first,
            width: grid.width,
            count: grid.count,
            unit,
        }
    }

    fn write_lives(&self, listed: &[u32], numbers: &mut StackNumbers) -> (Writer, u64) {
        // The most important ones take the first numbers, and keep their text the longest.
        let mut rows: Vec<(&Life, u32)> = listed
            .iter()
            .map(|&index| {
                let life = &self.lives.all[index as usize];
                (life, numbers.number(life.stack))
            })
            .collect();
        rows.sort_by_key(|(life, _)| (life.birth, life.address, life.end));
        let lives = || rows.iter().map(|row| row.0);
        let unit = unit(lives().flat_map(|life| [life.address, life.size].map(|n| n.min(LARGEST))));
        let everybody_else = u32::try_from(self.order.len()).unwrap_or(u32::MAX);
        let mut writer = Writer::default();
        writer.differences(lives().map(|life| u64::from(life.birth)));
        writer.plain(lives().map(|life| u64::from(life.end - life.birth)));
        writer.plain(lives().map(|life| u64::from(life.end - life.released)));
        writer.plain(lives().map(|life| life.size.min(LARGEST) / unit));
        writer.differences(lives().map(|life| life.address.min(LARGEST) / unit));
        writer.plain(rows.iter().map(|row| u64::from(row.1)));
        writer.plain(
            lives().map(|life| u64::from(self.places[life.owner as usize].min(everybody_else))),
        );
        (writer, unit)
    }

    fn owners(&self, most: usize, numbers: &mut StackNumbers) -> Vec<OwnerHead> {
        let listed = &self.order[..self.order.len().min(most)];
        let mut heaviest = vec![(0_u64, None); listed.len()];
        for life in self.lives.all {
            let place = self.places[life.owner as usize] as usize;
            let is_there = (life.birth..life.released).contains(&self.peak.moment);
            if let Some(heaviest) = heaviest.get_mut(place)
                && (heaviest.1.is_none() || is_there && life.size > heaviest.0)
            {
                *heaviest = (if is_there { life.size } else { 0 }, Some(life.stack));
            }
        }
        listed
            .iter()
            .zip(heaviest)
            .map(|(&owner, (_, stack))| {
                let owner = owner as usize;
                let name = self.owners.get(owner).map_or("", String::as_str);
                OwnerHead {
                    name: texts::head(name, NAME).into_owned(),
                    peak_bytes: capped(self.peak.owners[owner].0),
                    peak_count: self.peak.owners[owner].1,
                    highest_bytes: capped(self.peak.highest[owner]),
                    stack: stack.map(|stack| numbers.number(stack)),
                }
            })
            .collect()
    }

    fn refusals(&self, numbers: &mut StackNumbers) -> Vec<RefusalHead> {
        let refusals = select::refusals(self.device).into_iter().take(MARKS);
        refusals
            .filter_map(|(moment, position)| {
                let event = self.device.events.get(position)?;
                Some(RefusalHead {
                    moment,
                    event: position,
                    requested_bytes: event.size.min(LARGEST),
                    device_free_bytes: event.address.min(LARGEST),
                    stack: numbers.number(event.stack),
                })
            })
            .collect()
    }

    fn annotations(&self) -> Vec<AnnotationHead> {
        let shown = self.annotations.iter().take(MARKS);
        shown
            .map(|&(moment, annotation)| AnnotationHead {
                moment,
                is_start: annotation.is_start,
                name: texts::head(self.snapshot.texts.get(annotation.name), NAME).into_owned(),
            })
            .collect()
    }

    /// What the listed lives have of a moment's totals.
    fn listed(&self, totals: &MomentHead, lives: &[u32], segments: &[u32]) -> MomentHead {
        fn sum<T: Ranked>(all: &[T], listed: &[u32], moment: Moment) -> u64 {
            let listed = listed.iter().map(|&index| &all[index as usize]);
            let there = listed.filter(|life| life.range().contains(&moment));
            capped(there.map(|life| i128::from(life.size())).sum())
        }
        MomentHead {
            listed_active_bytes: sum(self.lives.all, lives, totals.moment),
            listed_reserved_bytes: sum(&self.segments, segments, totals.moment),
            ..*totals
        }
    }
}

/// The totals of a moment, by asking every life.
fn totals(
    (moment, reason): (Moment, Reason),
    lives: &Lives<'_>,
    segments: &[SegmentLife],
) -> MomentHead {
    let (mut allocated, mut active) = (0, 0);
    for life in lives.all {
        if life.range().contains(&moment) {
            active += i128::from(life.size);
            if moment < life.released {
                allocated += i128::from(life.size);
            }
        }
    }
    let segments = segments
        .iter()
        .filter(|life| life.range().contains(&moment));
    MomentHead {
        moment,
        reason,
        allocated_bytes: capped(allocated),
        active_bytes: capped(active),
        reserved_bytes: capped(segments.map(|life| i128::from(life.size)).sum()),
        listed_active_bytes: 0,
        listed_reserved_bytes: 0,
    }
}

/// The longest beginning of a ranking that fits when written: how many, their unit and their bytes.
fn fit(
    ranked: &[u32],
    budget: usize,
    mut write: impl FnMut(&[u32]) -> (Writer, u64),
) -> (usize, u64, Vec<u8>) {
    // A row takes a byte or more, nearly always.
    let mut count = ranked.len().min(budget);
    loop {
        let (writer, unit) = write(&ranked[..count]);
        let bytes = writer.deflated();
        if bytes.len() <= budget || count == 0 {
            return (count, unit, bytes);
        }
        // As many as would fit if all took the same, a little fewer, and always fewer than before.
        let fair = count as u128 * budget as u128 / bytes.len() as u128;
        count = usize::try_from(fair * 15 / 16).unwrap_or(0).min(count - 1);
    }
}

fn write_segments(segments: &[SegmentLife], listed: &[u32]) -> (Writer, u64) {
    let mut rows: Vec<&SegmentLife> = listed.iter().map(|&i| &segments[i as usize]).collect();
    rows.sort_by_key(|life| (life.birth, life.address, life.end));
    let rows = || rows.iter().copied();
    let unit = unit(rows().flat_map(|life| [life.address, life.size].map(|n| n.min(LARGEST))));
    let mut writer = Writer::default();
    writer.differences(rows().map(|life| u64::from(life.birth)));
    writer.plain(rows().map(|life| u64::from(life.end - life.birth)));
    writer.plain(rows().map(|life| life.size.min(LARGEST) / unit));
    writer.differences(rows().map(|life| life.address.min(LARGEST) / unit));
    writer.plain(rows().map(|life| life.stream.min(LARGEST)));
    writer.plain(rows().map(|life| u64::from(life.pool.0)));
    writer.plain(rows().map(|life| u64::from(life.is_small) | u64::from(life.is_expandable) << 1));
    (writer, unit)
}

/// 512 when all are multiples of it, as they are unless the snapshot is damaged; else 1.
fn unit(mut values: impl Iterator<Item = u64>) -> u64 {
    if values.all(|value| value % 512 == 0) {
        512
    } else {
        1
    }
}

/// Annotations of a device with the moment that their time falls on.
fn placed<'a>(
    annotations: &'a [Annotation],
    device: &DeviceRecord,
) -> Vec<(Moment, &'a Annotation)> {
    let mut times: Vec<u64> = Vec::new();
    let mut placed: Vec<_> = annotations
        .iter()
        .filter(|annotation| annotation.device == device.index)
        .map(|annotation| {
            if times.is_empty() {
                times = device.events.iter().map(|event| event.time_us).collect();
            }
            let moment = times.partition_point(|&time| time <= annotation.time_us);
            (Moment::try_from(moment).unwrap_or(Moment::MAX), annotation)
        })
        .collect();
    placed.sort_by_key(|&(moment, annotation)| (moment, annotation.time_us));
    placed
}
