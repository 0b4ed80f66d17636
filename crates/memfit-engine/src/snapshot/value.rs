//! What stands on the stack of a pickle, and what it remembers.
//!
//! Responsible for values of 16 bytes and a memory of 8 bytes an entry. Not responsible for the contents
//! of containers: a container is a number into the [`Containers`](super::containers::Containers).

/// One value.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) enum Value {
    #[default]
    None,
    Bool(bool),
    Int(i64),
    /// From 2^63 on.
    Unsigned(u64),
    Float(f64),
    /// A number of the text table.
    Text(u32),
    /// A tuple of two whole numbers, such as a pool's id.
    Pair(u32),
    /// A dict or a list.
    Container(u32),
    /// Something that no snapshot needs; its contents were dropped.
    Other(Other),
}

/// Kinds of which only the name is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Other {
    HugeInt,
    Bytes,
    Tuple,
    Set,
}

impl Value {
    /// As a count of bytes, an address or a time: any whole number from 0 on.
    pub(super) const fn unsigned(self) -> Option<u64> {
        match self {
            Self::Int(value) if value >= 0 => Some(value.cast_unsigned()),
            Self::Unsigned(value) => Some(value),
            _ => None,
        }
    }

    pub(super) const fn text(self) -> Option<u32> {
        match self {
            Self::Text(number) => Some(number),
            _ => None,
        }
    }

    pub(super) const fn container(self) -> Option<u32> {
        match self {
            Self::Container(number) => Some(number),
            _ => None,
        }
    }

    /// What Python calls its type.
    pub(super) const fn kind(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "a bool",
            Self::Int(_) | Self::Unsigned(_) | Self::Other(Other::HugeInt) => "an int",
            Self::Float(_) => "a float",
            Self::Text(_) => "a str",
            Self::Pair(_) | Self::Other(Other::Tuple) => "a tuple",
            Self::Container(_) => "a dict or list",
            Self::Other(Other::Bytes) => "bytes",
            Self::Other(Other::Set) => "a set",
        }
    }
}

/// What the pickle put aside, by number.
#[derive(Default)]
pub(super) struct Memo {
    /// `kind << 32 | number`; 0 is not set.
    entries: Vec<u64>,
    /// Values that have no number, which picklers hardly ever put aside.
    rare: Vec<Value>,
    count: usize,
}

const TEXT: u64 = 1 << 32;
const PAIR: u64 = 2 << 32;
const CONTAINER: u64 = 3 << 32;
const RARE: u64 = 4 << 32;
const KIND: u64 = !(u32::MAX as u64);

impl Memo {
    #[inline]
    pub(super) fn get(&self, at: usize) -> Option<Value> {
        let entry = *self.entries.get(at)?;
        let number = (entry & !KIND) as u32;
        match entry & KIND {
            CONTAINER => Some(Value::Container(number)),
            TEXT => Some(Value::Text(number)),
            PAIR => Some(Value::Pair(number)),
            RARE => Some(self.rare[number as usize]),
            _ => None,
        }
    }

    /// The number that `MEMOIZE` means: as many as are set.
    pub(super) const fn next(&self) -> usize {
        self.count
    }

    pub(super) fn put(&mut self, at: usize, value: Value) {
        let entry = match value {
            Value::Text(number) => TEXT | u64::from(number),
            Value::Pair(number) => PAIR | u64::from(number),
            Value::Container(number) => CONTAINER | u64::from(number),
            rare => {
                self.rare.push(rare);
                RARE | (self.rare.len() as u64 - 1)
            }
        };
        if at >= self.entries.len() {
            self.entries.resize(at + 1, 0);
        }
        self.count += usize::from(self.entries[at] == 0);
        self.entries[at] = entry;
    }

    pub(super) fn held_bytes(&self) -> u64 {
        (self.entries.capacity() * 8 + self.rare.capacity() * 16) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_takes_sixteen_bytes() {
        assert_eq!(size_of::<Value>(), 16);
    }

    #[test]
    fn what_is_put_aside_comes_back() {
        let mut memo = Memo::default();
        let values = [
            Value::Text(7),
            Value::Float(0.5),
            Value::Container(u32::MAX),
            Value::Pair(0),
        ];
        for value in values {
            memo.put(memo.next(), value);
        }
        memo.put(9, Value::None);
        assert!((0..4).map(|at| memo.get(at)).eq(values.map(Some)));
        assert_eq!(
            (memo.get(5), memo.get(9), memo.get(10)),
            (None, Some(Value::None), None)
        );
        assert_eq!(memo.next(), 5);
    }
}
