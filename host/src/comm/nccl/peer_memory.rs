//! Peer memory: memory of every rank that the kernels of every rank can access, if all ranks agree that they can.
//!
//! This module only maps memory; it neither reads nor writes it.

use super::session::{Failure, Session};
use crate::driver::{DeviceSlice, Mapping, Offer};
use crate::error::Result;
use crate::memory::SharedMemory;

/// Shares memory among all ranks; returns `None` on all of them if some memory cannot be reached.
pub(super) fn share(session: &Session, data: DeviceSlice<'_>) -> Result<Option<SharedMemory>> {
    // A handle of another machine is meaningless here, and opening it is not guaranteed to fail.
    if !session.neighbours.on_one_host {
        tracing::debug!(rank = session.member.rank(), "memory is not shared: the ranks are on several machines");
        return Ok(None);
    }
    let offer = Offer::new(data.queue(), data.address());
    if let Err(error) = &offer {
        tracing::debug!(rank = session.member.rank(), %error, "memory cannot be shared");
    }
    let own = postcard::to_stdvec(&offer.ok()).expect("plain data");
    let offers = exchange(session, &own)?;
    let opened: Vec<Option<Mapping>> = offers
        .iter()
        .map(|bytes| {
            let offer: Option<Offer> = postcard::from_bytes(bytes).ok().flatten();
            offer?.open(data.queue()).inspect_err(|error| tracing::debug!(%error, "a peer cannot be reached")).ok()
        })
        .collect();
    let mappings: Option<Vec<Mapping>> = opened.into_iter().collect();
    // If one rank cannot map all memory, no rank does: the others would wait for its kernels.
    let can = exchange(session, &[u8::from(mappings.is_some())])?;
    if can.iter().any(|answer| answer[..] != [1]) {
        drop(mappings);
        // No rank may free memory that another rank still has mapped.
        exchange(session, &[])?;
        return Ok(None);
    }
    Ok(mappings.map(|mappings| {
        let addresses = mappings.iter().map(Mapping::address).collect();
        let sharers = session.neighbours.sharers;
        SharedMemory { addresses, mappings, abort: session.abort.clone(), order: session.order.clone(), sharers }
    }))
}

/// Gathers a few bytes of every rank, in rank order.
pub(super) fn exchange(session: &Session, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let all = session.member.all_gather(bytes, session.options.deadline);
    Ok(all.inspect_err(|error| session.fail(Failure::Comm(error.clone())))?)
}
