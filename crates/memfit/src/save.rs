//! Writing a file whole or not at all.
//!
//! Responsible for the temporary file next to the target and the rename; whatever happens before the
//! rename leaves nothing behind. The temporary file has a random name, is made anew, and only its owner reads it: in a
//! folder that others write to too, a link laid there beforehand is never followed. Not responsible for what is in the
//! file.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

use crate::error::Failure;

/// A file that is opened before the work, so that a path that cannot be written is found first.
#[derive(Debug)]
pub(crate) struct PendingFile {
    target: PathBuf,
    temporary: NamedTempFile,
}

impl PendingFile {
    /// Opens a temporary file next to `target`.
    ///
    /// # Errors
    ///
    /// The folder does not exist or cannot be written to, or the path names a folder.
    pub(crate) fn create(target: &Path) -> Result<Self, Failure> {
        let fail = |error: &dyn Display| {
            Failure::usage(format!("cannot write `{}`: {error}", target.display()))
                .hint("choose a file in a folder that exists and that you may write to")
        };
        let Some(name) = target.file_name().filter(|_| !target.is_dir()) else {
            return Err(fail(&io::Error::from(io::ErrorKind::IsADirectory)));
        };
        let mut prefix = OsString::from(".");
        prefix.push(name);
        prefix.push(".");
        let folder = target.parent().filter(|it| !it.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let temporary = Builder::new()
            .prefix(&prefix)
            .suffix(".tmp")
            .tempfile_in(folder);
        Ok(Self {
            target: target.to_owned(),
            temporary: temporary.map_err(|error| fail(&without_path(&error)))?,
        })
    }

    /// Writes the bytes and puts the file in its place.
    ///
    /// # Errors
    ///
    /// The disk is full or the file cannot be renamed; nothing is left behind.
    pub(crate) fn commit(self, bytes: &[u8]) -> Result<(), Failure> {
        let target = self.target.clone();
        self.write_and_rename(bytes).map_err(|error| {
            Failure::usage(format!("cannot write `{}`: {error}", target.display()))
        })
    }

    fn write_and_rename(mut self, bytes: &[u8]) -> io::Result<()> {
        self.temporary.write_all(bytes)?;
        self.temporary.as_file().sync_all()?;
        self.temporary.persist(&self.target)?;
        Ok(())
    }
}

/// What the system said, without the path of the temporary file that was added to it.
fn without_path(error: &io::Error) -> String {
    let inner = error.get_ref().and_then(|added| added.source());
    inner.map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_file_appears_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("step.memfit");
        PendingFile::create(&path)
            .unwrap()
            .commit(b"whole")
            .unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(names(folder.path()), ["step.memfit"]);
    }

    #[test]
    fn a_dropped_file_leaves_nothing_and_keeps_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("step.memfit");
        fs::write(&path, b"old").unwrap();
        drop(PendingFile::create(&path).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["step.memfit"]);
    }

    #[test]
    fn folders_and_missing_folders_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        for path in [
            folder.path().to_owned(),
            folder.path().join("absent").join("step.memfit"),
        ] {
            let failure = PendingFile::create(&path).unwrap_err();
            assert!(
                failure.message().unwrap().starts_with("cannot write `"),
                "{failure:?}"
            );
        }
    }

    #[test]
    #[cfg(unix)]
    fn only_its_owner_reads_it_and_no_two_temporary_names_are_the_same() {
        use std::os::unix::fs::PermissionsExt as _;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("step.memfit");
        let (one, other) = (PendingFile::create(&path), PendingFile::create(&path));
        let (one, other) = (one.unwrap(), other.unwrap());
        assert_ne!(one.temporary.path(), other.temporary.path());
        drop(other);
        one.commit(b"whole").unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    #[cfg(unix)]
    fn a_link_in_the_place_of_the_target_is_replaced_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (victim, path) = (folder.path().join("victim"), folder.path().join("out.html"));
        fs::write(&victim, b"precious").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        PendingFile::create(&path).unwrap().commit(b"page").unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        assert_eq!(fs::read(&path).unwrap(), b"page");
        assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
    }
}
