//! The drain that a stop begins with, and that ends when the program has stopped: of `margay run --drain`, and of units
//! that `margay enable --drain` has prepared.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use margay_control::api::v1::{DrainRequest, UndrainRequest};
use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::Client;

/// Drains the names of a program.
#[derive(Clone)]
pub struct Drainer {
    client: Client,
    names: Vec<String>,
    /// How long connections that are there get to end.
    deadline: Duration,
    /// Those whose drain has begun by this: an operator may have drained others before.
    begun: Arc<Mutex<Vec<String>>>,
    /// A file for the same, where another process ends the drain.
    note: Option<PathBuf>,
}

impl Drainer {
    /// For names of this host's agent.
    pub fn new(client: Client, names: Vec<String>, deadline: Duration) -> Self {
        Self { client, names, deadline, begun: Arc::default(), note: None }
    }

    /// Notes in a file what it drains, for [`take_note`].
    #[must_use]
    pub fn noting(self, path: PathBuf) -> Self {
        Self { note: Some(path), ..self }
    }

    /// Drains all names.
    pub async fn drain(self) {
        let mut draining = JoinSet::new();
        for name in &self.names {
            draining.spawn(self.clone().drain_name(name.clone()));
        }
        draining.join_all().await;
    }

    async fn drain_name(mut self, name: String) {
        let request = DrainRequest {
            name: name.clone(),
            deadline_ms: u64::try_from(self.deadline.as_millis()).unwrap_or(u64::MAX),
            // As the service says.
            when: String::new(),
            quiet_ms: None,
            last: true,
            dry_run: false,
            until_restart: true,
            to: Vec::new(),
        };
        let drained = async {
            let mut reports = self.client.drain(request).await?.into_inner();
            self.note_begun(&name);
            while reports.message().await?.is_some() {}
            Ok::<(), tonic::Status>(())
        };
        if let Err(error) = drained.await {
            eprintln!("margay: {name} is not drained: {}", error.message());
        }
    }

    fn note_begun(&self, name: &str) {
        let mut begun = self.begun.lock();
        begun.push(name.to_owned());
        let Some(path) = &self.note else { return };
        if let Err(error) = fs::write(path, begun.join("\n")) {
            eprintln!(
                "margay: cannot write {}: {error}; {name} stays drained until `margay undrain {name}`",
                path.display()
            );
        }
    }

    /// The next start of the program serves the names again.
    pub async fn undrain(self) {
        let begun = std::mem::take(&mut *self.begun.lock());
        undrain(self.client, begun).await;
    }
}

/// Lets new flows come again to names that a [`Drainer`] has drained.
pub async fn undrain(mut client: Client, names: Vec<String>) {
    for name in names {
        if let Err(error) = client.undrain(UndrainRequest { name }).await {
            eprintln!("margay: {}", error.message());
        }
    }
}

/// The names that a file notes, once: it is removed. None where there is no file.
///
/// # Errors
///
/// The file is there, and cannot be read or removed.
pub fn take_note(path: &Path) -> io::Result<Vec<String>> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read?,
    };
    fs::remove_file(path)?;
    Ok(text.lines().map(str::to_owned).collect())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_is_noted_is_taken_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("stop");
        assert!(take_note(&path).expect("nothing is no error").is_empty());
        fs::write(&path, "web.shop\nadm.shop").expect("written");
        assert_eq!(take_note(&path).expect("read"), ["web.shop", "adm.shop"]);
        assert!(take_note(&path).expect("it is gone").is_empty());
        assert!(take_note(directory.path()).is_err(), "a directory is no note");
    }
}
