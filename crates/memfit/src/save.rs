//! Writing a file whole or not at all.
//!
//! Responsible for the temporary file next to the target and the rename; whatever happens before the
//! rename leaves nothing behind. Not responsible for what is in the file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::Failure;

/// A file that is opened before the work, so that a path that cannot be written is found first.
#[derive(Debug)]
pub(crate) struct PendingFile {
    target: PathBuf,
    temporary: PathBuf,
    file: Option<File>,
}

impl PendingFile {
    /// Opens a temporary file next to `target`.
    ///
    /// # Errors
    ///
    /// The folder does not exist or cannot be written to, or the path names a folder.
    pub(crate) fn create(target: &Path) -> Result<Self, Failure> {
        let fail = |error: &io::Error| {
            Failure::usage(format!("cannot write `{}`: {error}", target.display()))
                .hint("choose a file in a folder that exists and that you may write to")
        };
        let Some(name) = target.file_name().filter(|_| !target.is_dir()) else {
            return Err(fail(&io::Error::from(io::ErrorKind::IsADirectory)));
        };
        let mut temporary_name = std::ffi::OsString::from(".");
        temporary_name.push(name);
        temporary_name.push(format!(".{}.tmp", std::process::id()));
        let temporary = target.with_file_name(temporary_name);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .map_err(|error| fail(&error))?;
        Ok(Self {
            target: target.to_owned(),
            temporary,
            file: Some(file),
        })
    }

    /// Writes the bytes and puts the file in its place.
    ///
    /// # Errors
    ///
    /// The disk is full or the file cannot be renamed; nothing is left behind.
    pub(crate) fn commit(mut self, bytes: &[u8]) -> Result<(), Failure> {
        let target = self.target.clone();
        self.write_and_rename(bytes).map_err(|error| {
            Failure::usage(format!("cannot write `{}`: {error}", target.display()))
        })
    }

    fn write_and_rename(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(mut file) = self.file.take() {
            file.write_all(bytes)?;
            file.sync_all()?;
        }
        fs::rename(&self.temporary, &self.target)
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        // After a rename there is nothing to remove, and before it a failure changes nothing for anyone.
        let _absent = fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
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
}
