//! The JSON document of `memfit doctor`.
//!
//! Responsible for the shape, a contract as that of `document.rs`: what Python found out
//! ([`Examined`]), what the program tried itself, and which features follow from both. Not responsible for
//! finding out.

use std::collections::BTreeMap;

use memfit_engine::bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::device::Room;
use crate::report::comparison::Agreement;
use crate::report::document::StepFacts;

/// Version of the shape.
pub(crate) const SCHEMA_VERSION: u32 = 1;

/// `memfit doctor --format json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct DoctorDocument {
    pub(crate) schema_version: u32,
    /// Whether the main job runs on the CPU.
    pub(crate) is_ready: bool,
    /// What to do first where it does not.
    pub(crate) next_step: Option<String>,
    pub(crate) memfit_version: &'static str,
    #[serde(flatten)]
    pub(crate) examined: Examined,
    pub(crate) main_jobs: Vec<MainJob>,
    pub(crate) features: Vec<Feature>,
    pub(crate) devices: Vec<Room>,
    pub(crate) broker: BrokerFacts,
}

/// What Python found out.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub(crate) struct Examined {
    pub(crate) package_folder: String,
    pub(crate) python_version: String,
    pub(crate) python_path: String,
    pub(crate) system: String,
    /// Absent on other systems than Linux with glibc.
    pub(crate) glibc_version: Option<String>,
    pub(crate) processor: String,
    /// Absent where there is none.
    pub(crate) torch: Option<TorchFacts>,
    /// Why memfit cannot work with it, or without.
    pub(crate) torch_refusal: Option<String>,
    pub(crate) cuda: CudaFacts,
    pub(crate) tools: Vec<ToolFacts>,
    pub(crate) profiles: Vec<ProfileFacts>,
    pub(crate) folders: Vec<FolderFacts>,
    /// Absent where no place was named.
    pub(crate) offload: Option<OffloadFacts>,
    pub(crate) missing_names: Vec<MissingName>,
    pub(crate) remarks: Vec<String>,
    /// By feature, why it does not work; read into `features`.
    #[serde(skip_serializing)]
    pub(crate) trials: BTreeMap<String, Option<String>>,
    /// What to do about torch; read into the document's.
    #[serde(rename = "next_step", skip_serializing)]
    pub(crate) torch_next_step: Option<String>,
}

/// The torch that Python imports.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct TorchFacts {
    pub(crate) version: String,
    pub(crate) folder: String,
    /// The CUDA it is built for.
    pub(crate) cuda_version: Option<String>,
    pub(crate) rocm_version: Option<String>,
    /// Further ones on the path, which are not used.
    pub(crate) others: Vec<OtherTorch>,
    /// Absent where it was not imported.
    pub(crate) has_onednn: Option<bool>,
    /// Likewise.
    pub(crate) has_distributed: Option<bool>,
}

/// A torch that is on the path behind another.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct OtherTorch {
    pub(crate) version: String,
    pub(crate) folder: String,
}

/// CUDA as torch sees it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct CudaFacts {
    /// Why torch can use no device.
    pub(crate) why_not: Option<String>,
    pub(crate) devices: Vec<CudaDevice>,
}

/// A device that torch can use, by torch's number.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct CudaDevice {
    pub(crate) device: String,
    pub(crate) name: String,
    pub(crate) total_bytes: u64,
}

/// What Inductor compiles with.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct ToolFacts {
    pub(crate) name: String,
    /// Absent where it was not found.
    pub(crate) version: Option<String>,
    pub(crate) path: Option<String>,
    pub(crate) why_not: Option<String>,
}

/// The kept cost profile of a kind of device.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct ProfileFacts {
    pub(crate) device_kind: String,
    /// Where it is, or would be; absent without a home folder.
    pub(crate) path: Option<String>,
    /// The date; absent where there is none.
    pub(crate) calibrated: Option<String>,
    pub(crate) age_days: Option<u64>,
    /// Whether plans use it.
    pub(crate) is_used: bool,
    pub(crate) why_not: Option<String>,
}

/// A folder that memfit writes to.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct FolderFacts {
    pub(crate) purpose: String,
    pub(crate) path: Option<String>,
    /// Why nothing can be written there.
    pub(crate) why_not: Option<String>,
}

/// How fast a place for what is offloaded is.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub(crate) struct OffloadFacts {
    /// A folder, or `host`.
    pub(crate) place: String,
    pub(crate) write_bytes_per_second: Option<f64>,
    pub(crate) read_bytes_per_second: Option<f64>,
    pub(crate) why_not: Option<String>,
}

/// A name that memfit uses and this torch lacks.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct MissingName {
    pub(crate) name: String,
    /// Where memfit uses it.
    pub(crate) files: Vec<String>,
}

/// A tiny model predicted, planned, and run within a budget.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct MainJob {
    /// `cpu` or `cuda:0`.
    pub(crate) device: String,
    /// The last part that was done; absent where not even the first was.
    pub(crate) reached: Option<Stage>,
    pub(crate) why_not: Option<String>,
    pub(crate) budget_bytes: Option<Bytes>,
    pub(crate) unplanned: Option<StepFacts>,
    pub(crate) planned: Option<StepFacts>,
    /// Of loss and gradients, planned against unplanned: the worse of the two.
    pub(crate) agreement: Option<Agreement>,
    pub(crate) seconds: f64,
}

/// How far a main job came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stage {
    Predicted,
    Planned,
    Verified,
}

impl MainJob {
    pub(crate) fn new(device: &str) -> Self {
        Self {
            device: device.to_owned(),
            reached: None,
            why_not: None,
            budget_bytes: None,
            unplanned: None,
            planned: None,
            agreement: None,
            seconds: 0.0,
        }
    }

    /// Why the job did not come through a stage; nothing where it did.
    pub(crate) fn why_not(&self, stage: Stage) -> Option<String> {
        if self.reached >= Some(stage) {
            return None;
        }
        let unknown = || "it was not tried".to_owned();
        Some(self.why_not.clone().unwrap_or_else(unknown))
    }
}

/// One feature and why it does not work here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Feature {
    pub(crate) name: &'static str,
    pub(crate) works: bool,
    pub(crate) why_not: Option<String>,
}

/// The broker, or where it would be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct BrokerFacts {
    pub(crate) socket: String,
    /// The broker's process; absent where none runs.
    pub(crate) pid: Option<u32>,
    /// Its version of memfit.
    pub(crate) version: Option<String>,
    pub(crate) lease_count: Option<u64>,
    /// Why none can be used or started there.
    pub(crate) why_not: Option<String>,
}

/// What decides about each feature, in the order of the report.
pub(crate) fn features(
    examined: &Examined,
    main_jobs: &[MainJob],
    cuda_prediction: Option<String>,
    broker: &BrokerFacts,
) -> Vec<Feature> {
    let on = |device: &str, stage| {
        let job = main_jobs.iter().find(|job| job.device.starts_with(device));
        let untried = || examined.cuda.why_not.clone();
        job.map_or_else(untried, |job| job.why_not(stage))
    };
    let tried = |name: &str| match examined.trials.get(name) {
        Some(answer) => answer.clone(),
        None => examined.torch_refusal.clone(),
    };
    let rows = [
        ("predict", on("cpu", Stage::Predicted)),
        ("plan", on("cpu", Stage::Planned)),
        ("verify", on("cpu", Stage::Verified)),
        ("fit", on("cpu", Stage::Verified)),
        ("fit_cuda", on("cuda", Stage::Verified)),
        ("predict_cuda", cuda_prediction),
        ("run", tried("run")),
        ("guard", tried("guard")),
        ("track", tried("track")),
        ("offload_activations", tried("offload_activations")),
        ("offload_optimizer", tried("offload_optimizer")),
        ("offload_parameters", tried("offload_parameters")),
        ("park", tried("park")),
        ("compile_cpu", tried("compile_cpu")),
        ("compile_cuda", tried("compile_cuda")),
        // What these need is in the program itself.
        ("explain", None),
        ("place", None),
        ("broker", broker.why_not.clone()),
    ];
    let feature = |(name, why_not): (&'static str, Option<String>)| Feature {
        name,
        works: why_not.is_none(),
        why_not,
    };
    rows.map(feature).into()
}
