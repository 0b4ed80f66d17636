//! One technique as applied: what a plan says of it, and the same without what only the executor needs.
//!
//! Responsible for the two types and for their JSON, which is flat: `kind`, `class`, `count`, `bytes` and, where the
//! executor needs more, one field. Not responsible for which action a technique becomes, nor for the words about it
//! (`technique/`).

use schemars::JsonSchema;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};

use super::promise::Class;
use super::technique::kinds::{ActionKind, Details};
use crate::bytes::Bytes;

/// One technique as applied.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Deserialize)]
pub struct Action {
    /// Its promise.
    #[serde(alias = "class")]
    pub promise: Class,
    /// How many: allocations that are recomputed, let go, offloaded or shrunk; parameters that are fused or offloaded, or
    /// whose state is offloaded or held in 8 bits; slices; or pieces of the batch.
    pub count: u64,
    /// Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped, gradients
    /// freed, activations not needed at once.
    pub bytes: Bytes,
    /// Which technique, with what the executor needs for it.
    #[serde(flatten)]
    pub details: Details,
}

impl Action {
    /// One with its technique's promise.
    pub(super) fn new(details: Details, count: u64, bytes: Bytes) -> Self {
        Self {
            promise: details.kind().technique().promise,
            count,
            bytes,
            details,
        }
    }

    /// Which technique.
    #[must_use]
    pub const fn kind(&self) -> ActionKind {
        self.details.kind()
    }

    /// The action without what only the executor needs.
    #[must_use]
    pub const fn summary(&self) -> ActionSummary {
        ActionSummary {
            kind: self.kind(),
            promise: self.promise,
            count: self.count,
            bytes: self.bytes,
            resident_bytes: match &self.details {
                Details::OffloadParameters { offload_parameters } => {
                    Some(offload_parameters.room_bytes)
                }
                _ => None,
            },
        }
    }
}

impl Serialize for Action {
    // By hand for the order of the fields alone: a derived one would write `kind` and the details side by side.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_map(None)?;
        fields.serialize_entry("kind", &self.kind())?;
        fields.serialize_entry("promise", &self.promise)?;
        fields.serialize_entry("count", &self.count)?;
        fields.serialize_entry("bytes", &self.bytes)?;
        self.details.serialize_into(&mut fields)?;
        fields.end()
    }
}

/// One action without what only the executor needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ActionSummary {
    /// Which technique.
    pub kind: ActionKind,
    /// Its promise.
    #[serde(alias = "class")]
    pub promise: Class,
    /// As in [`Action`].
    pub count: u64,
    /// As in [`Action`].
    pub bytes: Bytes,
    /// Most bytes of offloaded parameters that are resident at a time; absent for other kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<Bytes>,
}

impl ActionSummary {
    /// One with its technique's promise, where no more is known.
    #[must_use]
    pub fn new(kind: ActionKind, count: u64, bytes: Bytes) -> Self {
        Self {
            kind,
            promise: kind.technique().promise,
            count,
            bytes,
            resident_bytes: None,
        }
    }

    /// What it does, in words.
    #[must_use]
    pub fn effect(&self) -> String {
        (self.kind.technique().effect)(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::TECHNIQUES;

    /// An action of each kind as plans write it.
    const KEPT: [&str; 19] = [
        r#"{"kind":"remat","promise":"exact","count":1,"bytes":64,"remat":{"drops":[{"op":3,"output":0,"shape":[4,4],"bytes":64,"module":"a.b","home":5}],"active":[{"module":"a","call":0,"start":2,"end":9}],"names":["aten.mm.default"],"forward":[0,0]}}"#,
        r#"{"kind":"unneeded_saves","promise":"exact","count":1,"bytes":64,"unneeded_saves":{"drops":[{"op":3,"output":0,"shape":[4,4],"bytes":64,"module":"a.b"}],"active":[],"names":[],"forward":[]}}"#,
        r#"{"kind":"fuse_optimizer","promise":"exact","count":12,"bytes":99840}"#,
        r#"{"kind":"one_by_one","promise":"exact","count":12,"bytes":99840}"#,
        r#"{"kind":"micro_batch","promise":"equivalent","count":4,"bytes":18446744073709551615,"micro_batch":{"names":["aten.mm.default"],"forward":[0,0]}}"#,
        r#"{"kind":"allocator_settings","promise":"exact","count":1,"bytes":0,"settings":"expandable_segments:True"}"#,
        r#"{"kind":"offload","promise":"exact","count":1,"bytes":64,"offload":{"tier":"disk","folder":"/scratch","window_bytes":128,"stores":[{"op":3,"output":1,"shape":[],"bytes":64,"module":""}],"order":[0],"active":[],"names":[],"forward":[]}}"#,
        r#"{"kind":"shrink","promise":"approximate","count":2,"bytes":64,"shrink":{"half":[{"op":3,"output":0,"shape":[],"bytes":64,"module":""}],"eight_bit":[{"op":4,"output":0,"shape":[],"bytes":64,"module":""}],"active":[],"names":[],"forward":[]}}"#,
        r#"{"kind":"offload_optimizer","promise":"exact","count":1,"bytes":64,"offload_optimizer":{"tier":"host","folder":"","window_bytes":0,"least_bytes":4096,"order":["head.weight"]}}"#,
        r#"{"kind":"optimizer_bits","promise":"approximate","count":2,"bytes":64,"optimizer_bits":{"names":["head.weight","body.weight"]}}"#,
        r#"{"kind":"offload_parameters","promise":"exact","count":1,"bytes":64,"offload_parameters":{"tier":"disk","folder":"/scratch","room_bytes":32,"ahead_bytes":16,"names":["head.weight"],"order":[0,0]}}"#,
        r#"{"kind":"autocast","promise":"approximate","count":1,"bytes":64,"autocast":{"dtype":"bfloat16","cache":false}}"#,
        r#"{"kind":"autocast_fp16","promise":"approximate","count":1,"bytes":64,"autocast_fp16":{"dtype":"float16","cache":true}}"#,
        r#"{"kind":"half_parameters","promise":"approximate","count":2,"bytes":64,"half_parameters":{"names":["head.weight","body.weight"]}}"#,
        r#"{"kind":"int8_weights","promise":"approximate","count":2,"bytes":64,"int8_weights":{"names":["head.weight","body.weight"]}}"#,
        r#"{"kind":"int8_dynamic","promise":"approximate","count":2,"bytes":64,"int8_dynamic":{"names":["head.weight","body.weight"],"dynamic":["body.weight"]}}"#,
        r#"{"kind":"chunk","promise":"equivalent","count":8,"bytes":64,"chunk":{"loss":{"slices":8,"weight":"head.weight","rows":4,"classes":8,"logit_bytes":128}}}"#,
        r#"{"kind":"no_graph","promise":"exact","count":1,"bytes":64}"#,
        r#"{"kind":"undo_checkpoints","promise":"exact","count":3,"bytes":64}"#,
    ];

    #[test]
    fn each_kind_is_read_and_written_as_plans_have_it() {
        let read = KEPT.map(|json| serde_json::from_str::<Action>(json).unwrap());
        for (action, json) in read.iter().zip(KEPT) {
            assert_eq!(serde_json::to_string(action).unwrap(), json);
            assert_eq!(action.promise, action.kind().technique().promise);
        }
        let kinds = TECHNIQUES.iter().map(|it| it.kind);
        let kinds = kinds.filter(|&kind| kind != ActionKind::Noop);
        assert!(read.iter().map(Action::kind).eq(kinds));
    }

    #[test]
    fn micro_batches_of_older_plans_say_no_ops() {
        let older = r#"{"kind":"micro_batch","class":"equivalent","count":4,"bytes":1}"#;
        let read: Action = serde_json::from_str(older).unwrap();
        let is_silent = matches!(read.details, Details::MicroBatch { micro_batch: None });
        assert!(is_silent);
    }

    #[test]
    fn the_promise_is_read_under_its_name_in_version_1() {
        for json in KEPT {
            let before = json.replace("promise", "class");
            let read: Action = serde_json::from_str(&before).unwrap();
            assert_eq!(read, serde_json::from_str(json).unwrap());
        }
    }

    #[test]
    fn what_may_be_absent_or_foreign_does_not_matter() {
        let action = r#"{"offload_optimizer":{"tier":"host","window_bytes":0,"least_bytes":1,"order":[]},
                         "bytes":1,"remat":null,"count":1,"promise":"exact","later":[1],"kind":"offload_optimizer"}"#;
        let action: Action = serde_json::from_str(action).unwrap();
        let Details::OffloadOptimizer { offload_optimizer } = action.details else {
            panic!("{action:?}")
        };
        assert_eq!(offload_optimizer.folder, "");
    }

    #[test]
    fn what_an_executor_could_not_carry_out_is_refused() {
        for (json, said) in [
            (
                r#"{"kind":"remat","promise":"exact","count":1,"bytes":1}"#,
                "missing field `remat`",
            ),
            (
                r#"{"kind":"remat","promise":"exact","count":1,"bytes":1,"remat":null}"#,
                "invalid type: null",
            ),
            (
                r#"{"kind":"chunk","promise":"exact","count":1,"bytes":1,"offload":{}}"#,
                "missing field `chunk`",
            ),
            (
                r#"{"kind":"allocator_settings","promise":"exact","count":1,"bytes":1}"#,
                "missing field `settings`",
            ),
            (
                r#"{"kind":"magic","promise":"exact","count":1,"bytes":1}"#,
                "unknown variant `magic`",
            ),
            (
                r#"{"promise":"exact","count":1,"bytes":1}"#,
                "missing field `kind`",
            ),
            (
                r#"{"kind":"micro_batch","promise":"exact","count":-1,"bytes":1}"#,
                "invalid value",
            ),
        ] {
            let error = serde_json::from_str::<Action>(json)
                .unwrap_err()
                .to_string();
            assert!(error.contains(said), "{json}: {error}");
        }
    }

    #[test]
    fn a_summary_says_what_is_done() {
        let effects = KEPT.map(|json| {
            let action: Action = serde_json::from_str(json).unwrap();
            action.summary().effect()
        });
        assert_eq!(
            effects,
            [
                "1 tensor recomputed in backward",
                "1 saved tensor let go: backward never needs it",
                "12 parameters updated as soon as their gradients are ready",
                "12 parameters updated one by one",
                "the batch in 4 pieces",
                "free memory is not lost to fragmentation",
                "1 tensor offloaded until backward",
                "2 tensors held in fewer bits until backward",
                "optimizer state of 1 parameter offloaded between updates",
                "optimizer state of 2 parameters in 8 bits",
                "1 parameter offloaded; at most 32 B resident",
                "matrix products and convolutions in 16 bits",
                "matrix products and convolutions in float16",
                "2 parameters in 16 bits",
                "2 weights in 8 bits",
                "2 weights in 8 bits, and their products",
                "computed in up to 8 slices",
                "forward under `torch.no_grad()`: its graph is never used",
                "3 checkpoints of the model run as ordinary forward",
            ]
        );
    }
}
