//! Memory of every rank for the kernels of every rank: who can reach whom, agreed on by all.
//!
//! It maps memory; nothing here reads or writes it.

use std::sync::Arc;

use super::session::{Failure, Session};
use crate::driver::{DeviceSlice, Mapping, Offer};
use crate::error::Result;
use crate::memory::SharedMemory;

/// Shares memory among all ranks, or tells all of them that some cannot be reached.
pub(super) fn share(session: &Session, data: DeviceSlice<'_>) -> Result<Option<SharedMemory>> {
    // A handle of another machine's means nothing here, and nobody promises that opening it fails.
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
    // One rank that cannot is enough: the others would wait for its kernels.
    let can = exchange(session, &[u8::from(mappings.is_some())])?;
    if can.iter().any(|answer| answer[..] != [1]) {
        drop(mappings);
        // No rank may free what another still has mapped.
        exchange(session, &[])?;
        return Ok(None);
    }
    Ok(mappings.map(|mappings| {
        let addresses = mappings.iter().map(Mapping::address).collect();
        let sharers = session.neighbours.sharers;
        SharedMemory { addresses, mappings, abort: Arc::clone(&session.abort), sharers }
    }))
}

fn exchange(session: &Session, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let all = session.member.all_gather(bytes, session.options.deadline);
    Ok(all.inspect_err(|error| session.fail(Failure::Comm(error.clone())))?)
}
