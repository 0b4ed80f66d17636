//! The text of `memfit devices`.

use memfit_engine::bytes::Bytes;

use crate::device::Room;
use crate::printer::Palette;
use crate::report::sharing::DevicesDocument;
use crate::report::table::{Align, Table};
use crate::report::words;

/// The devices, with what a step needs there if one was named.
pub(crate) fn devices(document: &DevicesDocument, palette: Palette) -> String {
    use Align::{Left, Right};
    let Some(target) = &document.target else {
        let rooms = document.devices.iter().map(|device| &device.room);
        return self::rooms(rooms).render(0, palette);
    };
    let columns = [Left, Right, Right, Right, Right, Right, Left, Left];
    let mut table = Table::new(&columns).header([
        "device",
        "total",
        "free",
        "grantable",
        "room",
        "needs",
        "",
        "",
    ]);
    for device in &document.devices {
        let [name, total, free, grantable, room, maker] = cells(&device.room);
        let verdict = match device.fits {
            None => "-",
            Some(true) => "fits",
            Some(false) => "does not fit",
        };
        let needs = told(device.needed_bytes.map(|bytes| bytes.0));
        table.row([
            name,
            total,
            free,
            grantable,
            room,
            needs,
            verdict.to_owned(),
            maker,
        ]);
    }
    let mut text = table.render(0, palette);
    let answer = match &document.best {
        Some(best) => palette.good(&format!("{target} has room on {best}")),
        None => palette.bad(&format!("no device has room for {target} as it is")),
    };
    text.extend(["\n", &answer, "\n"]);
    text
}

/// What each memory has, whatever a step needs.
pub(super) fn rooms<'a>(rooms: impl Iterator<Item = &'a Room>) -> Table {
    use Align::{Left, Right};
    let columns = [Left, Right, Right, Right, Right, Left];
    let mut table =
        Table::new(&columns).header(["device", "total", "free", "grantable", "room", ""]);
    for room in rooms {
        table.row(cells(room));
    }
    table
}

fn cells(room: &Room) -> [String; 6] {
    [
        room.device.clone(),
        told(room.total_bytes),
        told(room.free_bytes),
        told(room.grantable_bytes),
        Bytes(room.room_bytes).to_string(),
        words::inert(&room.name, 40),
    ]
}

/// Bytes, or a dash where it is unknown.
fn told(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes(bytes).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sharing::DeviceRoom;

    fn room(device: &str, free: u64, granted: Option<u64>) -> Room {
        Room {
            device: device.to_owned(),
            total_bytes: Some(80 << 30),
            free_bytes: Some(free << 30),
            grantable_bytes: granted.map(|bytes| bytes << 30),
            room_bytes: granted.map_or(free, |granted| granted.min(free)) << 30,
            ..Room::default()
        }
    }

    #[test]
    fn the_roomiest_gpu_that_fits_is_named_before_the_host() {
        let need = Some(Bytes(10 << 30));
        let devices = vec![
            DeviceRoom::new(room("host", 70, None), need),
            DeviceRoom::new(room("cuda:0", 40, Some(8)), need),
            DeviceRoom::new(room("cuda:1", 20, None), need),
            DeviceRoom::new(room("cuda:2", 30, Some(25)), need),
        ];
        let document = DevicesDocument::new(Some("gpt2.py:build".to_owned()), devices);
        insta::assert_snapshot!(super::devices(&document, Palette::PLAIN), @"
        device      total       free  grantable       room      needs
        host    80.00 GiB  70.00 GiB          -  70.00 GiB  10.00 GiB  fits
        cuda:0  80.00 GiB  40.00 GiB   8.00 GiB   8.00 GiB  10.00 GiB  does not fit
        cuda:1  80.00 GiB  20.00 GiB          -  20.00 GiB  10.00 GiB  fits
        cuda:2  80.00 GiB  30.00 GiB  25.00 GiB  25.00 GiB  10.00 GiB  fits

        gpt2.py:build has room on cuda:2
        ");
    }

    #[test]
    fn where_nothing_fits_the_numbers_say_by_how_much() {
        let devices = vec![DeviceRoom::new(
            room("host", 4, None),
            Some(Bytes(10 << 30)),
        )];
        let document = DevicesDocument::new(Some("gpt2.py:build".to_owned()), devices);
        insta::assert_snapshot!(super::devices(&document, Palette::PLAIN), @"
        device      total      free  grantable      room      needs
        host    80.00 GiB  4.00 GiB          -  4.00 GiB  10.00 GiB  does not fit

        no device has room for gpt2.py:build as it is
        ");
        let plain =
            DevicesDocument::new(None, vec![DeviceRoom::new(room("host", 4, Some(2)), None)]);
        insta::assert_snapshot!(super::devices(&plain, Palette::PLAIN), @"
        device      total      free  grantable      room
        host    80.00 GiB  4.00 GiB   2.00 GiB  2.00 GiB
        ");
    }
}
