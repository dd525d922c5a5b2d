//! Files, links and folders that other users may have put in the place of the rendezvous file or on its path: each is refused with an error
//! that names it, without a wait.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gradsync::bootstrap::{BootstrapError, Rendezvous};
use gradsync_tests::ranks::guarded;

use crate::AT_ONCE;
use crate::group::{Way, barrier, on_ranks, refused};
use crate::rendezvous_file::wait_for;

/// The id of another user, who need not exist.
const SOMEBODY_ELSE: u32 = 54_321;
const SHORT: Duration = Duration::from_millis(300);

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Reports a case that this machine cannot test. It writes to standard error directly, as libtest captures `eprintln!` of tests that pass.
fn not_tested(what: &str) {
    std::io::stderr().write_all(format!("not tested: {what}\n").as_bytes()).unwrap();
}

/// Gives a file to another user, which only root can do; returns whether it succeeded.
fn give_away(path: &Path) -> bool {
    let outcome = chown(path, Some(SOMEBODY_ELSE), None);
    if let Err(error) = &outcome {
        not_tested(&format!("files of another user: {error}"));
    }
    outcome.is_ok()
}

/// Creates a file by a program; returns whether it succeeded.
fn made_by(program: &str, path: &Path, arguments: &[&str]) -> bool {
    let outcome = Command::new(program).arg(path).args(arguments).status();
    let is_made = outcome.is_ok_and(|status| status.success());
    if !is_made {
        not_tested(&format!("what `{program}` would make at {}", path.display()));
    }
    is_made
}

/// Runs a join that must be refused at once. It runs on a thread of its own, so that a join that hangs fails the test.
fn refused_soon(rendezvous: &Rendezvous, rank: usize) -> BootstrapError {
    let (start, rendezvous) = (Instant::now(), rendezvous.clone());
    let join = thread::spawn(move || refused(rendezvous.join(rank, 2)));
    while !join.is_finished() {
        assert!(start.elapsed() < AT_ONCE, "rank {rank} waits");
        thread::sleep(Duration::from_millis(5));
    }
    join.join().unwrap()
}

type Make = fn(&Path) -> bool;

/// Rank 0 refuses it too, as it would otherwise destroy it.
#[test]
fn what_is_no_file_is_refused_at_once() {
    guarded(120, || {
        let make: [(&str, Make); 5] = [
            ("a FIFO", |path| made_by("mkfifo", path, &[])),
            ("a folder", |path| fs::create_dir(path).is_ok()),
            ("a socket", |path| UnixListener::bind(path).is_ok()),
            ("a symbolic link", |path| symlink("elsewhere", path).is_ok()),
            // The device numbers are those of `/dev/null`.
            ("a device", |path| made_by("mknod", path, &["c", "1", "3"])),
        ];
        for (kind, make) in make {
            let meeting = Way::File.meeting();
            if !make(&meeting.path) {
                continue;
            }
            for rank in [1, 0] {
                let error = refused_soon(&meeting.rendezvous, rank);
                let path = resolved(&meeting.path);
                assert_eq!(error, BootstrapError::NotAFile { path: path.clone(), kind: kind.into() });
                assert!(error.to_string().contains(&path) && error.to_string().contains(kind), "{error}");
            }
            assert!(!meeting.path.symlink_metadata().unwrap().is_file(), "{kind} was replaced");
        }
        let error = refused_soon(&Rendezvous::file("/"), 0);
        assert_eq!(error, BootstrapError::NotAFile { path: "/".into(), kind: "a folder".into() });
    });
}

/// The path as errors name it, without symbolic links to the temporary folder.
fn resolved(path: &Path) -> String {
    let folder = path.parent().unwrap().canonicalize().unwrap();
    folder.join(path.file_name().unwrap()).display().to_string()
}

/// The planted file comes from another user who listens and waits for ranks to join.
#[test]
fn a_planted_file_leads_nobody_to_another_group() {
    guarded(120, || {
        let (theirs, meeting) = (Way::File.meeting(), Way::File.meeting());
        let is_over = &AtomicBool::new(false);
        thread::scope(|scope| {
            let their_rank_0 = scope.spawn(|| {
                let member = theirs.rendezvous.join(0, 2).unwrap();
                assert!(is_over.load(Ordering::Relaxed), "a rank was led into another group");
                barrier(&member);
            });
            let planted = wait_for(&theirs.path);
            let plant = |mode| {
                fs::write(&meeting.path, &planted).unwrap();
                set_mode(&meeting.path, mode);
            };
            let own = rustix::process::geteuid().as_raw();
            let check = |owner, mode| {
                let error = refused_soon(&meeting.rendezvous.clone().with_deadline(SHORT), 1);
                let text = error.to_string();
                for part in [resolved(&meeting.path), format!("owner {owner}"), format!("mode {mode:04o}")] {
                    assert!(text.contains(&part), "{text}");
                }
                assert!(
                    matches!(error, BootstrapError::UntrustedFile { owner: found, mode: bits, .. } if (found, bits) == (owner, mode)),
                    "{error:?}"
                );
            };
            for mode in [0o644, 0o640, 0o620, 0o602] {
                plant(mode);
                check(own, mode);
            }
            for mode in [0o644, 0o600] {
                plant(mode);
                if give_away(&meeting.path) {
                    check(SOMEBODY_ELSE, mode);
                }
            }
            // Rank 0 replaces the planted file, and the others find the new one.
            on_ranks([1, 0], |rank| {
                if rank == 0 {
                    thread::sleep(SHORT);
                }
                barrier(&meeting.rendezvous.join(rank, 2).unwrap());
            });
            is_over.store(true, Ordering::Relaxed);
            barrier(&theirs.rendezvous.join(1, 2).unwrap());
            their_rank_0.join().unwrap();
        });
    });
}

/// In such a folder, another user can replace our file by one that leads to another group, or remove it.
#[test]
fn a_folder_where_others_can_replace_the_file_is_refused() {
    guarded(120, || {
        let meeting = Way::File.meeting();
        let outer = meeting.path.parent().unwrap().canonicalize().unwrap().join("outer");
        let inner = outer.join("inner");
        fs::create_dir_all(&inner).unwrap();
        set_mode(&outer, 0o755);
        set_mode(&inner, 0o755);
        let link = meeting.path.with_file_name("link");
        symlink("outer/inner", &link).unwrap();
        let rendezvous = |folder: &Path| Rendezvous::file(folder.join("rendezvous")).with_deadline(AT_ONCE * 2);
        let meets = |folder: &Path| on_ranks([0, 1], |rank| barrier(&rendezvous(folder).join(rank, 2).unwrap()));
        let is_refused = |untrusted: &Path, owner: u32, mode: u32| {
            for folder in [&inner, &link] {
                for rank in [0, 1] {
                    let error = refused_soon(&rendezvous(folder), rank);
                    let BootstrapError::UntrustedFolder { path, owner: found, mode: bits, .. } = &error else {
                        panic!("{error:?}")
                    };
                    assert_eq!((Path::new(path), *found, *bits), (untrusted, owner, mode), "{error}");
                    let parts = [path.clone(), format!("owner {owner}"), format!("mode {mode:04o}")];
                    assert!(parts.iter().all(|part| error.to_string().contains(part)), "{error}");
                }
            }
        };
        let own = rustix::process::geteuid().as_raw();
        for folder in [&inner, &outer] {
            for mode in [0o777, 0o775, 0o757] {
                set_mode(folder, mode);
                is_refused(folder, own, mode);
            }
            // With the sticky bit, as in `/tmp`, only the owner can replace a file here.
            set_mode(folder, 0o1777);
            meets(&inner);
            meets(&link);
            set_mode(folder, 0o755);
            if give_away(folder) {
                is_refused(folder, SOMEBODY_ELSE, 0o755);
                chown(folder, Some(own), None).unwrap();
            }
        }
        meets(&inner);
    });
}
