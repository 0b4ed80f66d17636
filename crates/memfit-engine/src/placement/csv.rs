//! Allocations and placements as CSV, in the form of google/minimalloc.
//!
//! Responsible for reading allocations, with the line and column of what is wrong, and for writing a
//! placement. Not responsible for files.
//!
//! A header, then one row per allocation. Columns in any order: `id`, `lower`, `upper` and `size` have to
//! be there, `alignment` may be; others are left alone. Live ranges are half-open. `start` and `begin` stand
//! for `lower`, `buffer` and `buffer_id` for `id`; `end` stands for `upper` but is the last moment
//! *included*. An empty row ends the file. Lines end in LF or CRLF.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{Allocation, InvalidProblem, Placement, Problem};

/// Allocations with their names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Name of each allocation.
    pub ids: Vec<String>,
    /// The allocations.
    pub problem: Problem,
}

/// What is wrong with a CSV, and where; both count from 1, the column in characters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {cause}")]
pub struct CsvError {
    /// The line.
    pub line: usize,
    /// The first character at fault.
    pub column: usize,
    /// What is wrong there.
    pub cause: CsvCause,
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CsvCause {
    /// There is no header.
    #[error("the file is empty; it starts with a header such as `id,lower,upper,size`")]
    Empty,
    /// The bytes are no text.
    #[error("this is no UTF-8 text")]
    NotText,
    /// A column has to be there and is not.
    #[error("the header has no column `{0}`")]
    MissingColumn(&'static str),
    /// A column is there twice, perhaps under two names.
    #[error("`{0}` is a second column for the same thing as `{1}`")]
    DuplicateColumn(String, String),
    /// A row has more or fewer fields than the header.
    #[error("{found} fields, where the header has {expected}")]
    FieldCount {
        /// Fields of the row.
        found: usize,
        /// Fields of the header.
        expected: usize,
    },
    /// A field that has to be a number is none.
    #[error("`{column}` is `{text}`, which is no integer")]
    NotANumber {
        /// The column's name.
        column: String,
        /// The field.
        text: String,
    },
    /// A number is too large or too small to be held.
    #[error("`{column}` is `{text}`, which does not fit 64 bits")]
    Range {
        /// The column's name.
        column: String,
        /// The field.
        text: String,
    },
    /// A size or alignment is negative.
    #[error("`{column}` is `{text}`: it cannot be negative")]
    Negative {
        /// The column's name.
        column: String,
        /// The field.
        text: String,
    },
    /// An id was given before.
    #[error("id `{id}` is that of line {line} already")]
    DuplicateId {
        /// The id.
        id: String,
        /// Where it was given first.
        line: usize,
    },
    /// An allocation is idle in between.
    #[error("`gaps` is `{0}`: gaps inside a live range are not supported")]
    Gaps(String),
    /// The allocation cannot be placed.
    #[error("{0}")]
    Invalid(InvalidProblem),
}

/// What a column is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Id,
    Lower,
    Upper,
    Size,
    Alignment,
    Gaps,
}

impl Role {
    fn of(name: &str) -> Option<Self> {
        match name {
            "id" | "buffer" | "buffer_id" => Some(Self::Id),
            "lower" | "start" | "begin" => Some(Self::Lower),
            "upper" | "end" => Some(Self::Upper),
            "size" => Some(Self::Size),
            "alignment" => Some(Self::Alignment),
            "gaps" => Some(Self::Gaps),
            _ => None,
        }
    }
}

/// The columns of a header: for each role its position and name.
struct Header {
    columns: BTreeMap<Role, (usize, String)>,
    width: usize,
}

/// One row, split.
struct Row<'t> {
    line: usize,
    fields: Vec<&'t str>,
}

impl Row<'_> {
    fn fail(&self, position: usize, cause: CsvCause) -> CsvError {
        let before = self.fields.iter().take(position);
        let column = before.map(|field| field.chars().count() + 1).sum::<usize>() + 1;
        CsvError {
            line: self.line,
            column,
            cause,
        }
    }
}

/// Reads allocations; `alignment` is that of rows that give none.
///
/// # Errors
///
/// The first thing wrong, with its line and column.
pub fn parse(bytes: &[u8], alignment: u64) -> Result<Table, CsvError> {
    let text = std::str::from_utf8(bytes).map_err(|error| not_text(bytes, error.valid_up_to()))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut rows = text.split('\n').zip(1..).map(|(line, number)| Row {
        line: number,
        fields: line.strip_suffix('\r').unwrap_or(line).split(',').collect(),
    });
    let is_blank = |row: &Row<'_>| row.fields.len() == 1 && row.fields[0].trim().is_empty();
    let header = rows.next().filter(|row| !is_blank(row));
    let header = header.ok_or(CsvError {
        line: 1,
        column: 1,
        cause: CsvCause::Empty,
    })?;
    let header = read_header(&header)?;
    let mut ids = Vec::new();
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    let mut allocations = Vec::new();
    for row in rows.take_while(|row| !is_blank(row)) {
        if row.fields.len() != header.width {
            let cause = CsvCause::FieldCount {
                found: row.fields.len(),
                expected: header.width,
            };
            return Err(row.fail(row.fields.len().min(header.width), cause));
        }
        let (id, allocation) = read_row(&header, &row, alignment)?;
        if let Some(&line) = lines.get(&id) {
            let position = header.columns.get(&Role::Id).map_or(0, |column| column.0);
            return Err(row.fail(position, CsvCause::DuplicateId { id, line }));
        }
        lines.insert(id.clone(), row.line);
        ids.push(id);
        allocations.push(allocation);
    }
    let problem = Problem::new(allocations).map_err(|invalid| {
        let role = match invalid {
            InvalidProblem::EmptyRange { .. } => Role::Lower,
            InvalidProblem::ZeroAlignment { .. } => Role::Alignment,
            InvalidProblem::Overflow { .. } => Role::Size,
        };
        // Rows follow the header without a break.
        let line = invalid.index() + 2;
        let fields = text.split('\n').nth(line - 1).unwrap_or("");
        let fields = fields.split(',').collect();
        let position = header.columns.get(&role).map_or(0, |column| column.0);
        Row { line, fields }.fail(position, CsvCause::Invalid(invalid))
    })?;
    Ok(Table { ids, problem })
}

fn not_text(bytes: &[u8], valid: usize) -> CsvError {
    let before = bytes.get(..valid).unwrap_or(bytes);
    let start = before
        .iter()
        .rposition(|&byte| byte == b'\n')
        .map_or(0, |end| end + 1);
    let characters = String::from_utf8_lossy(&before[start..]).chars().count();
    CsvError {
        line: before.split(|&byte| byte == b'\n').count(),
        column: characters + 1,
        cause: CsvCause::NotText,
    }
}

fn read_header(row: &Row<'_>) -> Result<Header, CsvError> {
    let mut columns: BTreeMap<Role, (usize, String)> = BTreeMap::new();
    for (position, name) in row.fields.iter().enumerate() {
        let name = name.trim();
        let Some(role) = Role::of(name) else {
            continue;
        };
        if let Some((_, first)) = columns.get(&role) {
            let cause = CsvCause::DuplicateColumn(name.to_owned(), first.clone());
            return Err(row.fail(position, cause));
        }
        columns.insert(role, (position, name.to_owned()));
    }
    for (role, name) in [
        (Role::Id, "id"),
        (Role::Lower, "lower"),
        (Role::Upper, "upper"),
        (Role::Size, "size"),
    ] {
        if !columns.contains_key(&role) {
            return Err(row.fail(0, CsvCause::MissingColumn(name)));
        }
    }
    Ok(Header {
        columns,
        width: row.fields.len(),
    })
}

fn read_row(
    header: &Header,
    row: &Row<'_>,
    alignment: u64,
) -> Result<(String, Allocation), CsvError> {
    let field = |role: Role| {
        let (position, name) = header.columns.get(&role)?;
        let text = row.fields.get(*position)?.trim();
        Some((*position, name.as_str(), text))
    };
    let integer = |role: Role| {
        let (position, name, text) = field(role).unwrap_or((0, "", ""));
        integer(name, text).map_err(|cause| row.fail(position, cause))
    };
    let unsigned = |role: Role| {
        let (position, name, text) = field(role).unwrap_or((0, "", ""));
        unsigned(name, text).map_err(|cause| row.fail(position, cause))
    };
    if let Some((position, _, text)) = field(Role::Gaps)
        && !text.is_empty()
    {
        return Err(row.fail(position, CsvCause::Gaps(text.to_owned())));
    }
    let lower = integer(Role::Lower)?;
    let mut upper = integer(Role::Upper)?;
    if let Some((position, "end", text)) = field(Role::Upper) {
        upper = upper.checked_add(1).ok_or_else(|| {
            let (column, text) = ("end".to_owned(), text.to_owned());
            row.fail(position, CsvCause::Range { column, text })
        })?;
    }
    let own_alignment = field(Role::Alignment).is_some_and(|(_, _, text)| !text.is_empty());
    let allocation = Allocation {
        lower,
        upper,
        size: unsigned(Role::Size)?,
        alignment: if own_alignment {
            unsigned(Role::Alignment)?
        } else {
            alignment
        },
    };
    let id = field(Role::Id).map_or("", |(_, _, text)| text);
    Ok((id.to_owned(), allocation))
}

fn integer(column: &str, text: &str) -> Result<i64, CsvCause> {
    let (column, given) = (column.to_owned(), text.to_owned());
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(CsvCause::NotANumber {
            column,
            text: given,
        });
    }
    text.parse().map_err(|_| CsvCause::Range {
        column,
        text: given,
    })
}

fn unsigned(column: &str, text: &str) -> Result<u64, CsvCause> {
    let (name, given) = (column.to_owned(), text.to_owned());
    match text.parse::<u64>() {
        Ok(value) => Ok(value),
        // Told apart as for signed numbers: no number, negative, or too large.
        Err(_) => match integer(column, text) {
            Err(CsvCause::NotANumber { column, text }) => {
                Err(CsvCause::NotANumber { column, text })
            }
            _ if text.starts_with('-') => Err(CsvCause::Negative {
                column: name,
                text: given,
            }),
            _ => Err(CsvCause::Range {
                column: name,
                text: given,
            }),
        },
    }
}

/// The allocations with an `offset` column; [`parse`] reads it again.
#[must_use]
pub fn write(table: &Table, placement: &Placement) -> String {
    let allocations = table.problem.allocations();
    let aligned = allocations
        .iter()
        .any(|allocation| allocation.alignment != 1);
    let mut text = String::from(if aligned {
        "id,lower,upper,size,alignment,offset\n"
    } else {
        "id,lower,upper,size,offset\n"
    });
    let offsets = &placement.offsets;
    for ((id, allocation), offset) in table.ids.iter().zip(allocations).zip(offsets) {
        let Allocation {
            lower,
            upper,
            size,
            alignment,
        } = allocation;
        let _infallible = if aligned {
            writeln!(text, "{id},{lower},{upper},{size},{alignment},{offset}")
        } else {
            writeln!(text, "{id},{lower},{upper},{size},{offset}")
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(text: &str) -> String {
        parse(text.as_bytes(), 1).unwrap_err().to_string()
    }

    fn ranges(text: &str) -> Vec<(i64, i64, u64, u64)> {
        let table = parse(text.as_bytes(), 64).unwrap();
        let allocations = table.problem.allocations().iter();
        allocations
            .map(|a| (a.lower, a.upper, a.size, a.alignment))
            .collect()
    }

    #[test]
    fn the_forms_that_minimalloc_reads() {
        let expected = [(0, 3, 4, 64), (3, 9, 4, 64)];
        for text in [
            "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\n",
            "id,lower,upper,size\r\nb1,0,3,4\r\nb2,3,9,4",
            "size,upper,lower,id\n4,3,0,b1\n4,9,3,b2\n",
            "buffer,start,end,size\nb1,0,2,4\nb2,3,8,4\n",
            "buffer_id,begin,upper,size,hint\nb1,0,3,4,-1\nb2,3,9,4,7\n\nanything\n",
            "id,lower,upper,size,alignment,gaps\nb1,0,3,4,64,\nb2,3,9,4,,\n",
        ] {
            assert_eq!(ranges(text), expected, "{text}");
        }
        assert_eq!(ranges("id,lower,upper,size\n"), []);
        assert_eq!(ranges("id,lower,upper,size\na,-5,-2,0"), [(-5, -2, 0, 64)]);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_position() {
        let row = |row: &str| message(&format!("id,lower,upper,size\na,0,1,8\n{row}\n"));
        for (said, expected) in [
            (
                message(""),
                "line 1, column 1: the file is empty; it starts with a header such as `id,lower,upper,size`",
            ),
            (
                message("id,lower,size\n"),
                "line 1, column 1: the header has no column `upper`",
            ),
            (
                message("id,lower,upper,end,size\n"),
                "line 1, column 16: `end` is a second column for the same thing as `upper`",
            ),
            (
                row("b,0,1"),
                "line 3, column 7: 3 fields, where the header has 4",
            ),
            (
                row("b,0,1,2,3"),
                "line 3, column 9: 5 fields, where the header has 4",
            ),
            (
                row("a,0,1,8"),
                "line 3, column 1: id `a` is that of line 2 already",
            ),
            (
                row("b,0,1,-8"),
                "line 3, column 7: `size` is `-8`: it cannot be negative",
            ),
            (
                row("b,0,1,8.5"),
                "line 3, column 7: `size` is `8.5`, which is no integer",
            ),
            (
                row("b,0,,8"),
                "line 3, column 5: `upper` is ``, which is no integer",
            ),
            (
                row("b,2,2,8"),
                "line 3, column 3: `lower` 2 is not below `upper` 2",
            ),
            (
                row("b,3,2,8"),
                "line 3, column 3: `lower` 3 is not below `upper` 2",
            ),
            (
                row("b,0,1,18446744073709551616"),
                "line 3, column 7: `size` is `18446744073709551616`, which does not fit 64 bits",
            ),
            (
                row("b,0,99999999999999999999,8"),
                "line 3, column 5: `upper` is `99999999999999999999`, which does not fit 64 bits",
            ),
            (
                row("b,0,1,9223372036854775807"),
                "line 3, column 7: the sizes and alignments up to here sum to 2^63 bytes or more",
            ),
            (
                message("id,lower,end,size\na,0,9223372036854775807,1"),
                "line 2, column 5: `end` is `9223372036854775807`, which does not fit 64 bits",
            ),
            (
                message("id,lower,upper,size,alignment\na,0,1,1,0"),
                "line 2, column 9: `alignment` is 0: it is at least 1",
            ),
            (
                message("id,lower,upper,size,gaps\na,0,9,1,2-3"),
                "line 2, column 9: `gaps` is `2-3`: gaps inside a live range are not supported",
            ),
        ] {
            assert_eq!(said, expected);
        }
        let said = parse(b"id,lower\n\xff", 1).unwrap_err().to_string();
        assert_eq!(said, "line 2, column 1: this is no UTF-8 text");
    }

    #[test]
    fn a_placement_is_written_and_read_again() {
        let table = parse(b"id,lower,upper,size\na,0,2,4\nb,1,3,4\n", 1).unwrap();
        let placement = Placement {
            offsets: vec![0, 4],
            height: 8,
        };
        let text = write(&table, &placement);
        assert_eq!(text, "id,lower,upper,size,offset\na,0,2,4,0\nb,1,3,4,4\n");
        assert_eq!(parse(text.as_bytes(), 1), Ok(table));
    }
}
