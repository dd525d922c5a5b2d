//! Adasum by one process of what several ranks have written to files, while no rank runs.
//!
//! `cargo run --example adasum_of_files` writes two tensors of four ranks to files, combines them, and prints the
//! weights of the ranks. Equal tensors are averaged, unrelated ones are added:
//!
//! ```text
//! equal: [1.0, 2.0, 3.0, 4.0] with the weights [0.25, 0.25, 0.25, 0.25]
//! unrelated: [1.0, 2.0, 3.0, 4.0] with the weights [1.0, 1.0, 1.0, 1.0]
//! four ranks that run have the same bits
//! ```
//!
//! Files are read piece by piece, so that memory does not grow with them. For checkpoints as safetensors there is the
//! program `gradsync reduce`.

#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use gradsync::ops::offline::{OfflineOp, OfflineReduction, Processor, RankTensors};
use gradsync::{Slice, prelude::*};

const RANKS: usize = 4;
/// The tensors of each file, in order: `LEN` little-endian `f32`s each.
const TENSORS: [&str; 2] = ["equal", "unrelated"];
const LEN: usize = 4;

/// One file of each rank.
struct Files(Vec<File>);

impl RankTensors for Files {
    fn ranks(&self) -> usize {
        self.0.len()
    }
    fn tensor_count(&self) -> usize {
        TENSORS.len()
    }
    fn tensor(&self, _: usize) -> (DType, usize) {
        (DType::F32, LEN)
    }
    fn read(&self, index: usize, elements: Range<usize>, work: &mut dyn FnMut(&[Slice<'_>])) -> Result<(), Error> {
        let (mut bytes, mut vectors) = (vec![0; elements.len() * size_of::<f32>()], Vec::new());
        for mut file in &self.0 {
            let begin = SeekFrom::Start(((index * LEN + elements.start) * size_of::<f32>()) as u64);
            let read = file.seek(begin).and_then(|_| file.read_exact(&mut bytes));
            read.map_err(|error| Error::InvalidArgument { operation: "read", reason: error.to_string() })?;
            let element = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
            vectors.push(bytes.chunks_exact(size_of::<f32>()).map(element).collect::<Vec<_>>());
        }
        work(&vectors.iter().map(Slice::from).collect::<Vec<_>>());
        Ok(())
    }
}

/// The elements of both tensors of a rank.
fn step(rank: usize) -> [Vec<f32>; 2] {
    let mut unrelated = vec![0.0; LEN];
    unrelated[rank] = rank as f32 + 1.0;
    [vec![1.0, 2.0, 3.0, 4.0], unrelated]
}

/// The same by ranks that run.
fn reduced_by(comm: &dyn Communicator) -> Result<Vec<Vec<f32>>, Error> {
    let mut buffer = GradientBuffer::new(DType::F32, RANKS, TENSORS.map(|name| (name, [LEN])))?;
    for ((_, mut tensor), elements) in buffer.tensors_mut().zip(step(comm.rank())) {
        tensor.copy_from_slice(&elements)?;
    }
    adasum_all_reduce(comm, &mut buffer, AdasumOptions::default())?;
    buffer.tensors().map(|(_, tensor)| tensor.to_vec()).collect()
}

fn reduce(folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let write = |rank: usize| {
        let path = folder.join(format!("rank{rank}.f32"));
        fs::write(&path, step(rank).concat().iter().flat_map(|element| element.to_le_bytes()).collect::<Vec<_>>())?;
        File::open(path)
    };
    let files = Files((0..RANKS).map(write).collect::<Result<_, _>>()?);
    let op = OfflineOp::Adasum(AdasumOptions::default());
    let mut reduction = OfflineReduction::new(&files, op, 1.0, Processor::Cpu)?;
    let mut results = Vec::new();
    for (index, name) in TENSORS.iter().enumerate() {
        let mut result = Vec::new();
        let weights = reduction.reduce(index, DType::F32, |piece| {
            result.extend(piece.to_vec::<f32>()?);
            Ok::<_, Error>(())
        })?;
        println!("{name}: {result:?} with the weights {weights:?}");
        results.push(result);
    }
    local::run(RANKS, |comm| reduced_by(&comm))?.iter().for_each(|of_rank| assert_eq!(*of_rank, results));
    println!("four ranks that run have the same bits");
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::temp_dir().join(format!("adasum_of_files-{}", std::process::id()));
    fs::create_dir(&folder)?;
    reduce(&folder).and(Ok(fs::remove_dir_all(&folder)?))
}
