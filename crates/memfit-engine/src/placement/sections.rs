//! Time as the search sees it: which allocations are alive together, and nothing else.
//!
//! Responsible for compressing times to *sections* and for who overlaps whom. Not responsible for sizes.
//!
//! A section is a largest set of allocations alive at one moment: the moment after the last birth before
//! a death. Every set of allocations that are alive together lies in one section, so a placement is right
//! when it is right in every section.
//!
//! ```text
//! time        0   1   2   3   4   5
//! a           [-------)                 sections: 0 at time 1 (a, b), 1 at time 2 (b, c)
//! b               [-----------)         a is alive in sections [0, 1), b in [0, 2), c in [1, 2)
//! c                       [-------)
//! ```

/// The half-open interval of sections in which an allocation is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) first: u32,
    pub(super) end: u32,
}

impl Span {
    pub(super) fn range(self) -> std::ops::Range<usize> {
        self.first as usize..self.end as usize
    }

    pub(super) const fn overlaps(self, other: Self) -> bool {
        self.first < other.end && other.first < self.end
    }
}

/// Lists of indices, one after the other.
#[derive(Debug, Clone, Default)]
pub(super) struct Lists {
    starts: Vec<usize>,
    entries: Vec<u32>,
}

impl Lists {
    pub(super) fn get(&self, index: usize) -> &[u32] {
        &self.entries[self.starts[index]..self.starts[index + 1]]
    }

    pub(super) fn range(&self, index: usize) -> std::ops::Range<usize> {
        self.starts[index]..self.starts[index + 1]
    }

    pub(super) fn entries(&self) -> &[u32] {
        &self.entries
    }

    fn gather<I: Iterator<Item = u32>>(lists: impl Iterator<Item = I>) -> Self {
        let mut gathered = Self {
            starts: vec![0],
            entries: Vec::new(),
        };
        for list in lists {
            gathered.entries.extend(list);
            gathered.starts.push(gathered.entries.len());
        }
        gathered
    }
}

/// The spans of half-open live ranges `(lower, upper)`, and the number of sections.
pub(super) fn spans(ranges: &[(i64, i64)]) -> (Vec<Span>, usize) {
    // At equal times the release comes first.
    let mut points: Vec<(i64, bool)> = Vec::with_capacity(2 * ranges.len());
    for &(lower, upper) in ranges {
        points.push((lower, true));
        points.push((upper, false));
    }
    points.sort_unstable();
    let mut moments: Vec<i64> = Vec::new();
    let mut last_birth = None;
    for (time, birth) in points {
        if birth {
            last_birth = Some(time);
        } else if let Some(moment) = last_birth.take() {
            moments.push(moment);
        }
    }
    let index = |found: usize| u32::try_from(found).unwrap_or(u32::MAX);
    let span = |&(lower, upper): &(i64, i64)| Span {
        first: index(moments.partition_point(|&moment| moment < lower)),
        end: index(moments.partition_point(|&moment| moment < upper)),
    };
    (ranges.iter().map(span).collect(), moments.len())
}

/// The allocations alive in each section, ascending.
pub(super) fn members(spans: &[Span], section_count: usize) -> Lists {
    let mut lists: Vec<Vec<u32>> = vec![Vec::new(); section_count];
    for (item, span) in (0..).zip(spans) {
        for list in &mut lists[span.range()] {
            list.push(item);
        }
    }
    Lists::gather(lists.into_iter().map(Vec::into_iter))
}

/// The number of ordered pairs of allocations that overlap.
pub(super) fn overlap_count(spans: &[Span]) -> usize {
    let mut starts: Vec<u32> = spans.iter().map(|span| span.first).collect();
    starts.sort_unstable();
    // Counted from the one that starts earlier: those that start before its end, less those before it.
    let mut count = 0;
    let mut order: Vec<&Span> = spans.iter().collect();
    order.sort_unstable_by_key(|span| span.first);
    for (position, span) in order.into_iter().enumerate() {
        count += starts.partition_point(|&start| start < span.end) - position - 1;
    }
    2 * count
}

/// The allocations that overlap each allocation, ascending, itself left out.
pub(super) fn neighbours(spans: &[Span]) -> Lists {
    let mut order: Vec<u32> = (0..).take(spans.len()).collect();
    order.sort_by_key(|&item| (spans[item as usize].first, item));
    let mut lists: Vec<Vec<u32>> = vec![Vec::new(); spans.len()];
    for (position, &item) in order.iter().enumerate() {
        let end = spans[item as usize].end;
        for &later in order[position + 1..]
            .iter()
            .take_while(|&&later| spans[later as usize].first < end)
        {
            lists[item as usize].push(later);
            lists[later as usize].push(item);
        }
    }
    for list in &mut lists {
        list.sort_unstable();
    }
    Lists::gather(lists.into_iter().map(Vec::into_iter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drawing_in_the_head_of_the_file() {
        let (spans, count) = spans(&[(0, 2), (1, 4), (2, 5)]);
        assert_eq!(count, 2);
        let span = |first, end| Span { first, end };
        assert_eq!(spans, [span(0, 1), span(0, 2), span(1, 2)]);
        let members = members(&spans, count);
        assert_eq!((members.get(0), members.get(1)), (&[0, 1][..], &[1, 2][..]));
        let neighbours = neighbours(&spans);
        assert_eq!(neighbours.get(0), [1]);
        assert_eq!(neighbours.get(1), [0, 2]);
        assert_eq!(overlap_count(&spans), 4);
    }

    #[test]
    fn ranges_that_touch_share_no_section() {
        let (spans, count) = spans(&[(0, 5), (5, 9)]);
        assert_eq!(count, 2);
        assert!(!spans[0].overlaps(spans[1]));
    }
}
