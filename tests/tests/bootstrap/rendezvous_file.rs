//! The rendezvous file: private, present only while ranks join, and never trusted when it is old.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use gradsync::bootstrap::{BootstrapError, Rendezvous};
use gradsync_tests::ranks::guarded;

use crate::PLENTY;
use crate::group::{Way, barrier, on_ranks, refused};

/// Waits for the file and returns its content.
pub(crate) fn wait_for(path: &Path) -> Vec<u8> {
    let start = Instant::now();
    loop {
        match fs::read(path) {
            Ok(bytes) => return bytes,
            Err(error) => assert!(start.elapsed() < PLENTY, "{}: {error}", path.display()),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Writes a file as rank 0 would, readable only by its owner.
fn leave(path: &Path, content: &[u8]) {
    fs::write(path, content).unwrap();
    #[cfg(unix)]
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
}

fn entries(path: &Path) -> usize {
    fs::read_dir(path.parent().unwrap()).unwrap().count()
}

#[test]
fn it_is_private_and_goes_when_all_have_joined() {
    guarded(60, || {
        let meeting = Way::File.meeting();
        thread::scope(|scope| {
            let rank_0 = scope.spawn(|| meeting.rendezvous.join(0, 2).unwrap());
            wait_for(&meeting.path);
            #[cfg(unix)]
            {
                let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&meeting.path).unwrap().permissions());
                assert_eq!(mode & 0o777, 0o600, "others may read the secret");
            }
            let rank_1 = meeting.rendezvous.join(1, 2).unwrap();
            let rank_0 = rank_0.join().unwrap();
            assert_eq!(entries(&meeting.path), 0, "something stayed behind");
            drop((rank_0, rank_1));
        });
        let error = refused(meeting.rendezvous.clone().with_deadline(Duration::from_millis(100)).join(0, 2));
        assert!(matches!(error, BootstrapError::Missing { .. }), "{error:?}");
        assert_eq!(entries(&meeting.path), 0, "something stayed behind a failure");
    });
}

/// The content of an old file leads to nobody, or is no rendezvous at all: ranks wait for the new file.
#[test]
fn an_old_file_is_not_believed() {
    guarded(60, || {
        let former = Way::File.meeting();
        let left_behind = thread::scope(|scope| {
            let rendezvous = former.rendezvous.clone().with_deadline(Duration::from_millis(300));
            let rank_0 = scope.spawn(move || refused(rendezvous.join(0, 2)));
            let bytes = wait_for(&former.path);
            rank_0.join().unwrap();
            bytes
        });
        for content in [left_behind, b"no rendezvous".to_vec(), Vec::new()] {
            let meeting = Way::File.meeting();
            leave(&meeting.path, &content);
            on_ranks(0..3, |rank| {
                if rank == 0 {
                    thread::sleep(Duration::from_millis(200));
                }
                barrier(&meeting.rendezvous.join(rank, 3).unwrap());
            });
        }
    });
}

/// The port of an old file may belong to another group by now, which has another secret.
#[test]
fn a_file_that_leads_to_another_group_is_not_believed() {
    guarded(60, || {
        let (other, meeting) = (Way::File.meeting(), Way::File.meeting());
        thread::scope(|scope| {
            let their_rank_0 = scope.spawn(|| barrier(&other.rendezvous.join(0, 2).unwrap()));
            let mut bytes = wait_for(&other.path);
            // The last bytes of the file are the secret.
            *bytes.last_mut().unwrap() ^= 1;
            leave(&meeting.path, &bytes);
            let deaf = meeting.rendezvous.clone().with_deadline(Duration::from_millis(200));
            let error = refused(deaf.join(1, 2));
            assert!(matches!(error, BootstrapError::WrongSecret { .. }), "{error:?}");
            on_ranks(0..2, |rank| {
                if rank == 0 {
                    thread::sleep(Duration::from_millis(200));
                }
                barrier(&meeting.rendezvous.join(rank, 2).unwrap());
            });
            barrier(&other.rendezvous.join(1, 2).unwrap());
            their_rank_0.join().unwrap();
        });
    });
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let error = refused(Rendezvous::file("/no/such/folder/file").join(0, 2));
    assert!(matches!(error, BootstrapError::File { .. }), "{error:?}");
    assert!(error.to_string().contains("/no/such/folder/file"), "{error}");
}

/// Two jobs with one file: the first rank 0 can no longer be found.
#[test]
fn rank_0_says_at_once_that_another_job_has_its_file() {
    guarded(60, || {
        let meeting = Way::File.meeting();
        thread::scope(|scope| {
            let first = scope.spawn(|| refused(meeting.rendezvous.join(0, 2)));
            let own = wait_for(&meeting.path);
            let start = Instant::now();
            let second = scope.spawn(|| meeting.rendezvous.join(0, 2));
            let error = first.join().unwrap();
            assert!(start.elapsed() < PLENTY / 2, "{:?}", start.elapsed());
            let BootstrapError::File { path, reason } = &error else { panic!("{error:?}") };
            assert!(Path::new(path).ends_with("rendezvous") && reason.contains("another"), "{error}");
            assert_ne!(wait_for(&meeting.path), own, "the first rank 0 has removed the second's file");
            drop(meeting.rendezvous.join(1, 2).unwrap());
            second.join().unwrap().unwrap();
        });
        let lonely = Way::File.meeting();
        thread::scope(|scope| {
            let rank_0 = scope.spawn(|| refused(lonely.rendezvous.join(0, 2)));
            wait_for(&lonely.path);
            fs::remove_file(&lonely.path).unwrap();
            let error = rank_0.join().unwrap();
            assert!(matches!(&error, BootstrapError::File { reason, .. } if reason.contains("removed")), "{error:?}");
        });
    });
}
