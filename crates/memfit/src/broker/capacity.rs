//! How much memory there is to grant.
//!
//! Responsible for `--memory` and for what stands in for it: the host's memory within cgroup limits, and
//! GPUs as NVML tells. Not responsible for what is in use: that is the clients' business and the margin's.

use std::fs;
use std::path::{Path, PathBuf};

use memfit_engine::bytes::{Budget, Bytes};

use crate::error::Failure;

/// Most devices a broker has.
const MOST_DEVICES: usize = 64;

/// What to grant on each device, and where the numbers come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Capacities {
    /// Names and bytes, each name once.
    pub(crate) devices: Vec<(String, Bytes)>,
    /// Sentences worth reading.
    pub(crate) notes: Vec<String>,
}

/// Reads `--memory DEVICE=BYTES` and `--memory auto`; nothing is `auto`.
pub(crate) fn read(specifications: &[String]) -> Result<Capacities, Failure> {
    let mut capacities = Capacities {
        devices: Vec::new(),
        notes: Vec::new(),
    };
    let mut is_automatic = specifications.is_empty();
    for specification in specifications {
        if specification == "auto" {
            is_automatic = true;
            continue;
        }
        let (name, bytes) = read_one(specification)?;
        if capacities.devices.iter().any(|(known, _)| *known == name) {
            return Err(Failure::usage(format!("`--memory` names `{name}` twice")));
        }
        capacities.devices.push((name, bytes));
    }
    if is_automatic {
        add_found(&mut capacities);
    }
    if capacities.devices.len() > MOST_DEVICES {
        return Err(Failure::usage(format!("more than {MOST_DEVICES} devices")));
    }
    if capacities.devices.is_empty() {
        return Err(Failure::usage("cannot find out how much memory there is")
            .hint("say it: `--memory host=16GiB`"));
    }
    Ok(capacities)
}

fn read_one(specification: &str) -> Result<(String, Bytes), Failure> {
    let wrong = |what: &str| {
        Failure::usage(format!("cannot read `--memory {specification}`: {what}"))
            .hint("write `--memory host=16GiB`, `--memory cuda:0=70GiB` or `--memory auto`")
    };
    let (name, size) = specification
        .split_once('=')
        .ok_or_else(|| wrong("there is no `=`"))?;
    if !is_device(name) {
        return Err(wrong("the device is `host` or `cuda:` and a number"));
    }
    match Budget::parse(size) {
        Ok(Budget::Absolute(bytes)) => Ok((name.to_owned(), bytes)),
        Ok(Budget::Percent(_)) => Err(wrong("a percentage of what is not said; write bytes")),
        Err(error) => Err(wrong(&error.to_string())),
    }
}

/// `host`, or `cuda:` and a number.
pub(crate) fn is_device(name: &str) -> bool {
    let is_number = |text: &str| {
        !text.is_empty() && text.len() <= 3 && text.bytes().all(|byte| byte.is_ascii_digit())
    };
    name == "host" || name.strip_prefix("cuda:").is_some_and(is_number)
}

/// Adds the devices that are found and were not named.
fn add_found(capacities: &mut Capacities) {
    let is_named =
        |devices: &[(String, Bytes)], name: &str| devices.iter().any(|(known, _)| known == name);
    if !is_named(&capacities.devices, "host") {
        match host() {
            Some((bytes, source)) => {
                capacities.notes.push(format!("host: {bytes}, {source}"));
                capacities.devices.insert(0, ("host".to_owned(), bytes));
            }
            None => capacities
                .notes
                .push("host: /proc/meminfo does not say".to_owned()),
        }
    }
    match crate::device::gpus() {
        Ok(found) => {
            for gpu in found {
                let (name, bytes) = (gpu.device, Bytes(gpu.total_bytes));
                if !is_named(&capacities.devices, &name) {
                    capacities
                        .notes
                        .push(format!("{name}: {bytes}, NVML's total"));
                    capacities.devices.push((name, bytes));
                }
            }
        }
        Err(reason) => capacities.notes.push(format!("no GPUs: {reason}")),
    }
}

/// The host's memory, or the smallest cgroup limit above this process.
fn host() -> Option<(Bytes, &'static str)> {
    let total = memfit_memory::pressure::meminfo("MemTotal")?;
    let limit = cgroup_limit();
    Some(match limit {
        Some(limit) if limit < total => (limit, "the cgroup's limit"),
        _ => (total, "all of the host's memory"),
    })
}

/// The smallest memory limit of the cgroups (version 2) that this process is in.
fn cgroup_limit() -> Option<Bytes> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let root = Path::new("/sys/fs/cgroup");
    let folder: PathBuf = root.join(own.trim_start_matches('/'));
    let limits = folder
        .ancestors()
        .take_while(|folder| folder.starts_with(root));
    let limits = limits.filter_map(|folder| {
        let text = fs::read_to_string(folder.join("memory.max")).ok()?;
        text.trim().parse().ok().map(Bytes)
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(specifications: &[&str]) -> Vec<String> {
        specifications.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn devices_and_bytes_as_people_write_them() {
        let read = read(&texts(&["host=16GiB", "cuda:0=70GiB"])).unwrap();
        let expected = [
            ("host".to_owned(), Bytes(16 << 30)),
            ("cuda:0".to_owned(), Bytes(70 << 30)),
        ];
        assert_eq!(read.devices, expected);
    }

    #[test]
    fn what_is_no_memory_is_refused_by_name() {
        for bad in [
            "host",
            "host=",
            "disk=1GiB",
            "cuda:=1GiB",
            "cuda:x=1",
            "host=50%",
            "host=-1",
            "=3GiB",
        ] {
            let failure = read(&texts(&[bad])).unwrap_err();
            assert!(failure.message().unwrap().contains(bad), "{bad}");
        }
        assert!(read(&texts(&["host=1GiB", "host=2GiB"])).is_err());
    }

    #[test]
    fn the_host_is_found_by_itself_and_what_is_said_counts_more() {
        let found = read(&texts(&["auto"])).unwrap();
        let own = read(&[]).unwrap();
        assert_eq!(found, own);
        assert_eq!(found.devices[0].0, "host");
        let said = read(&texts(&["auto", "host=1MiB"])).unwrap();
        assert_eq!(said.devices[0], ("host".to_owned(), Bytes(1 << 20)));
    }
}
