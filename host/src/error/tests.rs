//! What a program prints of an error that it returns from `main` or unwraps.

use super::*;

/// `Debug` in every form that programs use, with the plain text, which has to be in all of them.
#[track_caller]
fn shows_its_text(error: impl std::error::Error) {
    let text = error.to_string();
    assert_eq!(format!("{error:?}"), text);
    assert_eq!(format!("{error:#?}"), text);
    assert_eq!(format!("{:?}", Err::<(), _>(&error)), format!("Err({text})"));
}

#[test]
fn debug_of_every_public_error_is_its_text_with_the_remedy() {
    let own = BootstrapError::NoLauncher { looked_for: "RANK".into() };
    assert!(format!("{own:?}").contains("gradsync launch -n 2 -- PROGRAM"));
    shows_its_text(own.clone());
    shows_its_text(Error::from(own));
    let deadline = Duration::from_secs(2);
    let late = CommError::Timeout { operation: Operation::Barrier, missing: vec![1], deadline };
    shows_its_text(late.clone());
    shows_its_text(Error::from(late));
    let disagreement = Disagreement {
        operation: "a broadcast".into(),
        left_rank: 0,
        right_rank: 1,
        label: "dtype".into(),
        left: "f32".into(),
        right: "f16".into(),
    };
    shows_its_text(disagreement.clone());
    shows_its_text(Error::from(Box::new(disagreement)));
    shows_its_text(Error::InvalidArgument { operation: "sum", reason: "the factor NaN is not finite".into() });
    #[cfg(feature = "mpi")]
    shows_its_text(Error::from(MpiError::Finalised));
    #[cfg(feature = "cuda")]
    {
        shows_its_text(Error::from(CudaError { call: "cuInit".into(), code: 100, text: "no device".into() }));
        shows_its_text(Error::from(NcclError::NotFound { tried: Vec::new() }));
    }
}

#[test]
fn fields_of_an_error_stay_open_to_matching() {
    let error = Error::from(CommError::PeerGone { operation: Operation::Barrier, rank: 3, departure: Departure::Lost });
    assert!(matches!(error, Error::Comm(CommError::PeerGone { rank: 3, departure: Departure::Lost, .. })));
}
