//! Clearing memory: `zero` over bytes, `zero_segments` over a table of tensors, for any dtype: all bits zero is the number zero in each.

use super::kernel;
use crate::abi::{LaunchBounds, PIECE_TILES, Piece, THREADS, VECTOR_BYTES, ZERO_TILE_BYTES, ZERO_UNROLL};
use crate::{memory, reduce, thread};

/// Clears tile number `tile` of `bytes` bytes.
///
/// Tiles are counted from the aligned address at or before `destination`, so that all vectors except those at the borders are whole.
#[inline(always)]
unsafe fn clear(destination: u64, bytes: u64, tile: u64) {
    let end = destination + bytes;
    let base = destination / VECTOR_BYTES as u64 * VECTOR_BYTES as u64 + tile * ZERO_TILE_BYTES as u64;
    for step in 0..ZERO_UNROLL {
        let slot = step as u64 * THREADS as u64 + thread::thread_idx_x() as u64;
        let address = base + slot * VECTOR_BYTES as u64;
        // SAFETY: the launch provides `bytes` bytes; whole vectors and single bytes are checked against them.
        unsafe {
            if address >= destination && address + VECTOR_BYTES as u64 <= end {
                memory::store::<u32, 4>(address as *mut u32, [0; 4]);
            } else {
                for byte in address..address + VECTOR_BYTES as u64 {
                    if byte >= destination && byte < end {
                        (byte as *mut u8).write(0);
                    }
                }
            }
        }
    }
}

kernel!(["zero"], LaunchBounds::STREAM, fn (destination: u64, bytes: u64) {
    clear(destination, bytes, thread::block_idx_x() as u64)
});

kernel!(["zero_segments"], LaunchBounds::STREAM, fn (pieces: *const Piece, count: u64) {
    let block = thread::block_idx_x() as u64;
    let row = reduce::row_of_block(count, block, |row| (*pieces.add(row as usize)).first_block);
    let piece = *pieces.add(row as usize);
    for tile in 0..PIECE_TILES as u64 {
        clear(piece.destination, piece.len, (block - piece.first_block) * PIECE_TILES as u64 + tile);
    }
});
