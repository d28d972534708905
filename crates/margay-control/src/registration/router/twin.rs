//! Two hosts with one key: the one that is heard stays.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::timeout;

use super::Shared;
use crate::registration::refusal::No;
use crate::registration::roll::{Place, RollError};

/// Signs of life by which a host is there, when another one comes with its key.
const SIGNS: usize = 2;

/// A host has come whose key another one uses that is here. Where that one gives signs of life, it stays, is told,
/// and the later one is refused; where it gives none within a lease, it is gone, since a host is heard four times in
/// that: then the later one is the same, and has booted anew.
pub(super) async fn make_way(shared: &Shared, place: Place, boot_id: [u8; 16], from: SocketAddr) -> Result<(), No> {
    let Some(mut elder) = shared.roll.lock().elder(place, boot_id) else { return Ok(()) };
    let signs = async {
        // One may have been on its way when its host went.
        for _ in 0..SIGNS {
            elder.signs.changed().await.map_err(drop)?;
        }
        Ok::<_, ()>(())
    };
    let lease = Duration::from_millis(shared.config.lease_ms.into());
    if !matches!(timeout(lease, signs).await, Ok(Ok(()))) {
        return Ok(());
    }
    *elder.twin.lock() = Some(from);
    Err(RollError::Clone.into())
}
