//! Images for the demo and the study: Fashion-MNIST from a package of Debian or a derived distribution; otherwise, for the demo alone, the
//! digits in scikit-learn. No other registry has the same files.

use std::path::PathBuf;

use super::{device_compiler, python, variable};

/// The variable that names a folder with the four files of Fashion-MNIST.
pub(crate) const VARIABLE: &str = "GRADSYNC_FASHION_MNIST";
pub(super) const PACKAGE: &str = "dataset-fashion-mnist";
const FOLDER: &str = "/usr/share/datasets/fashion-mnist";
const FILES: [&str; 4] = [
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
];

/// The available image data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Images {
    /// The folder with the four files.
    FashionMnist(PathBuf),
    /// The file with the digits.
    Digits(PathBuf),
}

impl Images {
    /// The best data that are present.
    pub(crate) fn find() -> Option<Self> {
        fashion_mnist().or_else(|| Some(python::digits()).filter(|path| path.is_file()).map(Self::Digits))
    }

    /// The arguments for the training program.
    pub(crate) fn arguments(&self) -> [String; 2] {
        match self {
            Self::FashionMnist(folder) => ["--images".into(), folder.display().to_string()],
            Self::Digits(file) => ["--digits".into(), file.display().to_string()],
        }
    }
}

/// Fashion-MNIST, if it is present.
pub(crate) fn fashion_mnist() -> Option<Images> {
    let folder = variable(VARIABLE).map_or_else(|| PathBuf::from(FOLDER), PathBuf::from);
    FILES.iter().all(|file| folder.join(file).is_file()).then_some(Images::FashionMnist(folder))
}

/// Whether apt knows the package.
pub(super) fn apt_candidate() -> bool {
    device_compiler::candidate_of(PACKAGE).is_some_and(|version| version != "(none)")
}
