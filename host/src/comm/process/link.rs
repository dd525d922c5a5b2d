//! [`ProcessLink`]: a group of the processes of a [`Mesh`], as a [`Link`].

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::sync::Arc;

use super::NETWORK_BYTES;
use super::connection::FrameKind;
use super::mesh::{Mesh, WORLD};
use crate::comm::message_passing::{Buffers, Incoming, Link, LinkError, Outgoing, Pending, Record, Requests};
use crate::error::{Departure, Result};

/// This process's end of a group.
#[derive(Debug)]
struct ProcessLink {
    mesh: Arc<Mesh>,
    group: u64,
    rank: usize,
    /// The rank in the mesh of each rank here.
    numbers: Vec<usize>,
    /// Records that were received and not yet used, by sender.
    inbox: RefCell<Vec<VecDeque<Record>>>,
}

/// Makes the link of all ranks of the mesh.
pub(super) fn link_of_all(mesh: Arc<Mesh>) -> Box<dyn Link> {
    let (rank, numbers) = (mesh.rank(), (0..mesh.world_size()).collect());
    Box::new(ProcessLink::over(mesh, WORLD, rank, numbers))
}

impl ProcessLink {
    fn over(mesh: Arc<Mesh>, group: u64, rank: usize, numbers: Vec<usize>) -> Self {
        let inbox = RefCell::new(vec![VecDeque::new(); numbers.len()]);
        ProcessLink { mesh, group, rank, numbers, inbox }
    }

    fn others(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.numbers.iter().copied().enumerate().filter(|(peer, _)| *peer != self.rank)
    }

    fn message(&self, peer: usize, number: u64) -> Message {
        Message { mesh: self.mesh.clone(), group: self.group, peer: self.numbers[peer], number }
    }
}

impl Link for ProcessLink {
    fn transport(&self) -> &'static str {
        "processes"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.numbers.len()
    }

    fn post(&self, peer: usize, record: Record) -> Result<(), LinkError> {
        self.mesh.peer(self.numbers[peer]).connection.push(FrameKind::Record, self.group, &record.encode());
        Ok(())
    }

    fn pump(&self) -> Result<(), LinkError> {
        self.mesh.look_for_ends();
        let mut inbox = self.inbox.borrow_mut();
        for (peer, number) in self.others() {
            let mut connected = self.mesh.peer(number);
            let messages = connected.progress_of(self.group);
            inbox[peer].extend(messages.records.drain(..).map(|record| Record::decode(&record, peer)));
            if let Some(violation) = &connected.violation {
                return Err(LinkError(format!("the messages of rank {peer} violate the protocol: {violation}")));
            }
        }
        Ok(())
    }

    fn inbox(&self) -> RefMut<'_, Vec<VecDeque<Record>>> {
        self.inbox.borrow_mut()
    }

    fn has_data(&self, peer: usize) -> Result<bool, LinkError> {
        Ok(self.mesh.peer(self.numbers[peer]).progress_of(self.group).has_arrived())
    }

    unsafe fn send(&self, outgoing: Outgoing, requests: &mut Requests) {
        let mut peer = self.mesh.peer(self.numbers[outgoing.peer]);
        let (messages, connection) = peer.group_and_connection(self.group);
        let number = messages.start_sending(self.group, connection, outgoing.start, outgoing.bytes);
        peer.progress_of(self.group);
        requests.add(Ok(Box::new(Send { message: self.message(outgoing.peer, number) })));
    }

    unsafe fn receive(&self, incoming: Incoming, requests: &mut Requests) {
        let Incoming { peer, start, bytes } = incoming;
        let number = self.mesh.peer(self.numbers[peer]).group(self.group).start_receiving(start, bytes);
        requests.add(Ok(Box::new(Receive { message: self.message(peer, number) })));
    }

    fn buffers(&self) -> Option<&Buffers> {
        None
    }

    fn departure(&self, peer: usize) -> Option<Departure> {
        let mut peer = self.mesh.peer(self.numbers[peer]);
        // Since the last pump, a thread with another group may have received further records of this group, and then the departure. They
        // come first.
        let messages = peer.progress_of(self.group);
        if !messages.records.is_empty() {
            return None;
        }
        if messages.has_left {
            return Some(Departure::Left);
        }
        peer.connection.has_ended().then_some(Departure::Lost)
    }

    fn is_one_machine(&self) -> bool {
        self.others().all(|(_, number)| !self.mesh.peer(number).connection.leaves_machine())
    }

    fn longest_message(&self, peer: usize) -> usize {
        let leaves_machine = self.mesh.peer(self.numbers[peer]).connection.leaves_machine();
        if leaves_machine { NETWORK_BYTES } else { usize::MAX }
    }

    fn free_group(&self) -> u64 {
        self.mesh.free_group()
    }

    fn take_group(&self, number: u64) -> Result<bool> {
        Ok(self.mesh.take_group(number))
    }

    fn among(&self, members: &[usize], number: u64) -> Box<dyn Link> {
        let rank = members.iter().position(|&member| member == self.rank).expect("this rank is among them");
        let numbers = members.iter().map(|&member| self.numbers[member]).collect();
        Box::new(Self::over(self.mesh.clone(), number, rank, numbers))
    }

    fn leave(&mut self, _has_failed: bool) {
        self.others().for_each(|(_, number)| self.mesh.peer(number).leave(self.group));
    }

    /// The other ranks detect the end of this process without a further message.
    fn abort(&self, code: i32) -> ! {
        std::process::exit(code)
    }
}

/// A message between this process and another.
#[derive(Debug)]
struct Message {
    mesh: Arc<Mesh>,
    group: u64,
    /// The peer's rank in the mesh.
    peer: usize,
    number: u64,
}

#[derive(Debug)]
struct Send {
    message: Message,
}

impl Pending for Send {
    fn test(&mut self) -> Result<bool, LinkError> {
        let Message { mesh, group, peer, number } = &self.message;
        let mut peer = mesh.peer(*peer);
        peer.progress_of(*group);
        let (messages, connection) = peer.group_and_connection(*group);
        messages.sent(*number, connection)
    }

    fn cancel(&mut self) {
        let Message { mesh, group, peer, number } = &self.message;
        let mut peer = mesh.peer(*peer);
        let (messages, connection) = peer.group_and_connection(*group);
        messages.cancel_sending(*number, connection);
    }
}

#[derive(Debug)]
struct Receive {
    message: Message,
}

impl Pending for Receive {
    fn test(&mut self) -> Result<bool, LinkError> {
        let Message { mesh, group, peer, number } = &self.message;
        mesh.peer(*peer).progress_of(*group).received(*number)
    }

    fn cancel(&mut self) {
        let Message { mesh, group, peer, number } = &self.message;
        mesh.peer(*peer).group(*group).cancel_receiving(*number);
    }
}
