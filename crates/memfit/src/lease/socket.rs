//! Where the broker is, and whether it is ours.
//!
//! Responsible for the path of the socket, for the private folder around it and for who is on the other side.
//! Not responsible for what is said.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::boot;

/// Names the socket when it is somewhere else than usual.
pub const VARIABLE: &str = "MEMFIT_BROKER";

/// Why there is no broker to talk to.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// No broker listens there.
    #[error("no broker listens at `{}`", .0.display())]
    NoBroker(PathBuf),
    /// No broker listens there now, and the state file says that a broker did: others may hold what it granted.
    #[error("the broker at `{}` is away, and what it granted may be held", .0.display())]
    Away(PathBuf),
    /// The file or the process behind it belongs to somebody else.
    #[error("`{}` belongs to user {owner}, not to you: it is not used", .path.display())]
    Foreign {
        /// The path.
        path: PathBuf,
        /// The owner.
        owner: u32,
    },
    /// Others may write to the folder, so anyone could put a socket there.
    #[error("the folder `{}` is open to others: its mode is {mode:o}, and 700 is needed", .path.display())]
    Open {
        /// The folder.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// It is no socket or no folder.
    #[error("`{}` is {what}", .path.display())]
    Wrong {
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The system said no.
    #[error("cannot use `{}`: {error}", .path.display())]
    System {
        /// The path.
        path: PathBuf,
        /// What it said.
        error: io::Error,
    },
}

fn system(path: &Path, error: io::Error) -> SocketError {
    SocketError::System {
        path: path.to_owned(),
        error,
    }
}

/// The socket's path: `MEMFIT_BROKER`, or in a folder that is the user's alone.
#[must_use]
pub fn usual_path() -> PathBuf {
    if let Some(path) = env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        return path.into();
    }
    let runtime = env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty());
    let folder = runtime.map_or_else(
        || env::temp_dir().join(format!("memfit-{}", own_user())),
        |runtime| PathBuf::from(runtime).join("memfit"),
    );
    folder.join("broker.sock")
}

/// The user this process runs as.
pub(crate) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Makes the socket's folder if it is not there, and checks that no other user may write to it.
///
/// # Errors
///
/// It cannot be made, belongs to another, or is open to others.
pub(crate) fn private_folder(socket: &Path) -> Result<PathBuf, SocketError> {
    let folder = folder_of(socket);
    match fs::DirBuilder::new().mode(0o700).create(&folder) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(system(&folder, error)),
    }
    let metadata = fs::symlink_metadata(&folder).map_err(|error| system(&folder, error))?;
    if !metadata.is_dir() {
        return Err(SocketError::Wrong {
            path: folder,
            what: "no folder",
        });
    }
    if metadata.uid() != own_user() {
        return Err(SocketError::Foreign {
            path: folder,
            owner: metadata.uid(),
        });
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o022 != 0 {
        return Err(SocketError::Open { path: folder, mode });
    }
    Ok(folder)
}

/// Why no broker could listen at a path, found without making anything.
///
/// # Errors
///
/// As [`private_folder`] and [`check_path`], or the folder cannot be made.
pub(crate) fn check_place(socket: &Path) -> Result<(), SocketError> {
    let folder = folder_of(socket);
    if folder.exists() {
        private_folder(socket)?;
        return check_path(socket).map(drop);
    }
    let parent = folder.parent().filter(|path| !path.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let may_write = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    rustix::fs::access(parent, may_write).map_err(|error| system(parent, error.into()))
}

fn folder_of(socket: &Path) -> PathBuf {
    let folder = socket
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new(".")).to_owned()
}

/// What may stand at the socket's path: nothing, or a socket of our own.
///
/// # Errors
///
/// Something else is there.
pub(crate) fn check_path(path: &Path) -> Result<bool, SocketError> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(system(path, error)),
    };
    if metadata.uid() != own_user() {
        return Err(SocketError::Foreign {
            path: path.to_owned(),
            owner: metadata.uid(),
        });
    }
    if metadata.file_type().is_socket() {
        Ok(true)
    } else {
        Err(SocketError::Wrong {
            path: path.to_owned(),
            what: "no socket; it is left as it is",
        })
    }
}

/// Connects to the broker and checks that it is a process of ours.
///
/// # Errors
///
/// No broker listens, or another user's does.
pub(crate) fn connect(path: &Path) -> Result<UnixStream, SocketError> {
    if !check_path(path)? {
        return Err(absent(path));
    }
    let stream = UnixStream::connect(path).map_err(|error| match error.kind() {
        // A file that a dead broker left, or one that is gone since.
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => absent(path),
        _ => system(path, error),
    })?;
    let owner = user_behind(&stream).map_err(|error| system(path, error))?;
    if owner == own_user() {
        Ok(stream)
    } else {
        Err(SocketError::Foreign {
            path: path.to_owned(),
            owner,
        })
    }
}

/// No broker listens at a path.
fn absent(path: &Path) -> SocketError {
    if has_lived_at(path) {
        SocketError::Away(path.to_owned())
    } else {
        SocketError::NoBroker(path.to_owned())
    }
}

/// Whether a broker served this socket since the boot and did not end with nothing held, as its state file says: the
/// first line names the boot. One that cannot be read tells nothing, and so does not say that nothing is held.
fn has_lived_at(socket: &Path) -> bool {
    let known = match fs::read_to_string(socket.with_extension("state")) {
        Err(error) => return error.kind() != io::ErrorKind::NotFound,
        Ok(known) => known,
    };
    let begin = known.lines().next().map(serde_json::from_str::<Value>);
    match begin {
        Some(Ok(begin)) => begin["begin"]["boot"]
            .as_str()
            .is_none_or(|of| of == boot::name()),
        _ => true,
    }
}

/// The user of the process on the other side.
///
/// `rustix` would ask for less, and takes a process in a pid namespace that is not seen from here for an error.
fn user_behind(stream: &UnixStream) -> io::Result<u32> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let _inside = runtime.enter();
    stream.set_nonblocking(true)?;
    let credentials = tokio::net::UnixStream::from_std(stream.try_clone()?)?.peer_cred();
    stream.set_nonblocking(false)?;
    Ok(credentials?.uid())
}
