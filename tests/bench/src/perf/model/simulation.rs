//! [`simulate`]: the messages of a scheme, simulated individually over the links of a machine, as a check of the formulas.
//!
//! Every rank has one port to the ranks of its node and one to the other nodes; each port carries one message at a time in each direction.
//! The ports work in parallel, and a rank continues as soon as its own messages have arrived, whereas the formulas add all times up.

use gradsync::plan::cost::{Group, Parameters, Phase, Scheme, Work, Workload, World, phases};

/// Seconds until the last rank has the result; `None` if the scheme does not support the world, or a node is not full.
pub(super) fn simulate(parameters: &Parameters, scheme: Scheme, world: World, load: Workload) -> Option<f64> {
    if world.ranks % world.local() != 0 {
        return None;
    }
    let mut fabric = Fabric::new(parameters, world);
    phases(scheme, world, load)?.into_iter().for_each(|phase| fabric.run(phase));
    Some(fabric.ready.iter().copied().fold(0.0, f64::max))
}

/// The times at which a rank's port becomes free, per direction.
#[derive(Clone, Copy, Default)]
struct Port {
    out: f64,
    into: f64,
}

struct Fabric {
    world: World,
    /// The time at which each rank has finished all earlier work.
    ready: Vec<f64>,
    /// The ports to the own node, and to the other nodes.
    ports: [Vec<Port>; 2],
    parameters: Parameters,
    /// The seconds of one unit.
    step: f64,
    hop: f64,
    message: f64,
    bytes: [f64; 2],
}

impl Fabric {
    fn new(parameters: &Parameters, world: World) -> Self {
        let unit = |work: Work| parameters.time(&work);
        let one = Work::default();
        Self {
            world,
            ready: vec![0.0; world.ranks],
            ports: [vec![Port::default(); world.ranks], vec![Port::default(); world.ranks]],
            parameters: *parameters,
            step: unit(Work { steps: 1.0, ..one }),
            hop: unit(Work { hops: 1.0, ..one }),
            message: unit(Work { messages: 1.0, ..one }),
            bytes: [unit(Work { intra_bytes: 1.0, ..one }), unit(Work { inter_bytes: 1.0, ..one })],
        }
    }

    fn run(&mut self, phase: Phase) {
        match phase {
            Phase::Kernels(work) => {
                let time = self.parameters.time(&work);
                self.ready.iter_mut().for_each(|ready| *ready += time);
            }
            Phase::AllToAll(group, bytes) => {
                let members = self.begin(group);
                let part = bytes / members as f64;
                let ranks = self.world.ranks;
                self.send(1..members, |distance| (0..ranks).map(move |rank| (rank, group, distance, part)));
            }
            Phase::AllReduce(group, bytes) => {
                self.begin(group);
                self.scatter(group, bytes);
                self.gather(group, bytes);
            }
            Phase::AllGather(group, bytes) => {
                self.begin(group);
                self.gather(group, bytes);
            }
            Phase::ReduceScatter(group, bytes) => {
                self.begin(group);
                self.scatter(group, bytes);
            }
            Phase::Exchange(distance, bytes) => {
                self.ready.iter_mut().for_each(|ready| *ready += self.step);
                let posted = self.ready.clone();
                let peer = |rank: usize| if (rank / distance) % 2 == 0 { rank + distance } else { rank - distance };
                (0..self.world.ranks).for_each(|rank| self.message(&posted, rank, peer(rank), bytes));
            }
        }
    }

    /// Starts a collective and returns the number of the group's members. A group of one has no start-up time.
    fn begin(&mut self, group: Group) -> usize {
        let members = group.world(self.world).ranks;
        if members > 1 {
            self.ready.iter_mut().for_each(|ready| *ready += self.step);
        }
        members
    }

    /// Gathers shards: by recursive doubling between the nodes, then directly to each rank of the node.
    fn gather(&mut self, group: Group, bytes: f64) {
        let (local, nodes) = self.levels(group);
        let shard = bytes / (local * nodes) as f64;
        self.doublings(nodes).into_iter().for_each(|(distance, shards)| self.between(distance, shards * shard));
        self.inside(local, bytes / local as f64);
    }

    /// The messages of [`Self::gather`] in reverse.
    fn scatter(&mut self, group: Group, bytes: f64) {
        let (local, nodes) = self.levels(group);
        let shard = bytes / (local * nodes) as f64;
        self.inside(local, bytes / local as f64);
        self.doublings(nodes).into_iter().rev().for_each(|(distance, shards)| self.between(distance, shards * shard));
    }

    /// The number of ranks per node, and the number of nodes, in a group.
    fn levels(&self, group: Group) -> (usize, usize) {
        match group {
            Group::All => (self.world.local(), self.world.nodes()),
            Group::Node => (self.world.local(), 1),
            Group::Places => (1, self.world.nodes()),
        }
    }

    /// The distances of the steps that gather the shards of all nodes, with the number of shards that each step sends.
    fn doublings(&self, nodes: usize) -> Vec<(usize, f64)> {
        let distances = std::iter::successors(Some(1), |distance| Some(2 * distance));
        distances.take_while(|&distance| distance < nodes).map(|at| (at, at.min(nodes - at) as f64)).collect()
    }

    fn inside(&mut self, local: usize, bytes: f64) {
        let ranks = self.world.ranks;
        self.send(1..local, |distance| (0..ranks).map(move |rank| (rank, Group::Node, distance, bytes)));
    }

    fn between(&mut self, distance: usize, bytes: f64) {
        let ranks = self.world.ranks;
        self.send(distance..distance + 1, |at| (0..ranks).map(move |rank| (rank, Group::Places, at, bytes)));
    }

    /// Sends all messages of some rounds: from each rank to the rank at the given distance in its group.
    fn send<M: Iterator<Item = (usize, Group, usize, f64)>>(
        &mut self,
        rounds: std::ops::Range<usize>,
        messages: impl Fn(usize) -> M,
    ) {
        let posted = self.ready.clone();
        for (rank, group, distance, bytes) in rounds.flat_map(messages) {
            self.message(&posted, rank, self.peer(rank, group, distance), bytes);
        }
    }

    fn peer(&self, rank: usize, group: Group, distance: usize) -> usize {
        let (ranks, local) = (self.world.ranks, self.world.local());
        let place = rank % local;
        match group {
            // The peer is `distance / local` nodes further, and the remaining distance further within the node. All messages of a round
            // thus stay inside the nodes or none does, and all have different receivers.
            Group::All => (rank - place + distance / local * local) % ranks + (place + distance) % local,
            Group::Node => rank - place + (place + distance) % local,
            Group::Places => (rank + distance * local) % ranks,
        }
    }

    /// One message; both sides are ready for it at their times in `posted`.
    fn message(&mut self, posted: &[f64], from: usize, to: usize, bytes: f64) {
        let is_far = from / self.world.local() != to / self.world.local();
        let ports = &mut self.ports[usize::from(is_far)];
        let start = posted[from].max(posted[to]).max(ports[from].out).max(ports[to].into);
        let overhead = if is_far { self.message } else { 0.0 };
        let sent = start + overhead + bytes * self.bytes[usize::from(is_far)];
        ports[from].out = sent;
        ports[to].into = sent;
        self.ready[from] = self.ready[from].max(sent);
        let arrived = if is_far { sent + self.hop } else { sent };
        self.ready[to] = self.ready[to].max(arrived);
    }
}
