//! Carries what the store wants agreed to etcd: the store waits on its own thread, the network is asked from tasks.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc as reply;
use std::time::Duration;

use tokio::sync::mpsc;

use super::Shared;
use crate::store::{Agreement, Change, Dissent, Row, SharedTable};

/// Longer than etcd is given for an answer.
const LIMIT: Duration = Duration::from_secs(5);
/// What waits at once; more are refused.
const WAITING_MAX: usize = 256;

enum Errand {
    Agree(Vec<Change>, reply::SyncSender<Result<i64, Dissent>>),
    Ask(Vec<(SharedTable, Vec<u8>)>, reply::SyncSender<Result<Vec<Row>, String>>),
}

/// Where the store hands errands in.
pub struct Desk(mpsc::Sender<Errand>);

/// Gives the desk, and the task behind it.
pub fn open(shared: Arc<Shared>) -> (Desk, impl Future<Output = ()>) {
    let (sender, mut errands) = mpsc::channel(WAITING_MAX);
    let run = async move {
        let mut stopping = shared.stopping.subscribe();
        loop {
            tokio::select! {
                // The sender lives as long as the cluster.
                _ = stopping.wait_for(|stopping| *stopping) => return,
                errand = errands.recv() => match errand {
                    Some(errand) => drop(tokio::spawn(carry(Arc::clone(&shared), errand))),
                    None => return,
                },
            }
        }
    };
    (Desk(sender), run)
}

async fn carry(shared: Arc<Shared>, errand: Errand) {
    let etcd = shared.client.lock().clone().map(|(etcd, _)| etcd);
    // Whoever asked has stopped waiting where nobody takes the answer.
    match errand {
        Errand::Agree(changes, done) => {
            let agreed = match etcd {
                Some(mut etcd) => etcd.agree(&changes).await,
                None => Err(Dissent::Away(shared.away())),
            };
            let count = match &agreed {
                Ok(_) => &shared.counts.agreed,
                Err(Dissent::Outdated(_)) => &shared.counts.outdated,
                Err(Dissent::Away(_)) => &shared.counts.refused,
            };
            count.fetch_add(1, Ordering::Relaxed);
            let _ = done.send(agreed);
        }
        Errand::Ask(keys, done) => {
            let found = match etcd {
                Some(mut etcd) => etcd.ask(&keys).await.map_err(|trouble| trouble.to_string()),
                None => Err(shared.away()),
            };
            let _ = done.send(found);
        }
    }
}

impl Desk {
    fn hand_in<T>(&self, errand: Errand, answer: &reply::Receiver<T>) -> Result<T, String> {
        self.0.try_send(errand).map_err(|_| "too much waits for etcd, or this router goes down".to_owned())?;
        answer.recv_timeout(LIMIT).map_err(|_| format!("no answer in {LIMIT:?}"))
    }
}

impl Agreement for Desk {
    fn agree(&self, changes: &[Change]) -> Result<i64, Dissent> {
        let (done, answer) = reply::sync_channel(1);
        self.hand_in(Errand::Agree(changes.to_vec(), done), &answer).map_err(Dissent::Away)?
    }

    fn ask(&self, keys: &[(SharedTable, Vec<u8>)]) -> Result<Vec<Row>, String> {
        let (done, answer) = reply::sync_channel(1);
        self.hand_in(Errand::Ask(keys.to_vec(), done), &answer)?
    }
}
