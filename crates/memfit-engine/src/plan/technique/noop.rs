//! A technique that does nothing: all that a new one needs, and the proof that it needs no more.
//!
//! Only for tests. A trace's target says whether a plan uses it.

use super::{ActsOn, Technique};
use crate::bytes::Bytes;
use crate::plan::choice::Chosen;
use crate::plan::{Action, ActionKind, Class, Details, Plan};

const USED: &str = "noop";
const REFUSED: &str = "no noop";

pub(super) static TECHNIQUE: Technique = Technique {
    kind: ActionKind::Noop,
    name: "noop",
    title: "doing nothing",
    help: "Do nothing",
    promise: Class::Exact,
    effect: |_| "nothing done".to_owned(),
    short: None,
    acts_on: ActsOn::Batch,
    only_where_needed: false,
    refusal: |trace, _| {
        let refused = trace.meta.target == REFUSED;
        refused.then(|| "the target wants none".to_owned())
    },
    is_used: |outcome, _| outcome.trace.meta.target == USED,
    write,
};

fn write(_: &Chosen<'_>, plan: &mut Plan) {
    let details = Details::Noop {};
    plan.actions.push(Action::new(details, 1, Bytes::ZERO));
}

mod tests {
    use super::*;
    use crate::bytes::Budget;
    use crate::cost::CostSource;
    use crate::plan::{PlanRequest, Refusal, plan};
    use crate::trace::sample;

    /// The tests of the executor carry out the same.
    const JSON: &str = r#"{"kind":"noop","promise":"exact","count":1,"bytes":0}"#;

    fn planned(target: &str) -> Plan {
        let mut trace = sample::chain();
        target.clone_into(&mut trace.meta.target);
        let op_seconds = vec![1.0; trace.ops.len()];
        let request = PlanRequest {
            budget: Budget::Absolute(Bytes(1)),
            ..PlanRequest::default()
        };
        plan(&trace, &CostSource::profile(op_seconds), &request).unwrap()
    }

    #[test]
    fn it_goes_from_a_trace_through_a_plan_into_json_and_words() {
        let is_noop = |action: &&Action| action.kind() == ActionKind::Noop;
        let plan = planned(USED);
        let action = plan.actions.iter().find(is_noop).unwrap();
        assert_eq!(serde_json::to_string(action).unwrap(), JSON);
        assert_eq!(serde_json::from_str::<Action>(JSON).unwrap(), *action);
        assert_eq!(action.summary().effect(), "nothing done");
        assert!(planned("sample").actions.iter().find(is_noop).is_none());
    }

    #[test]
    fn its_refusal_is_said() {
        let kind = ActionKind::Noop;
        let reason = "the target wants none".to_owned();
        let refusals = planned(REFUSED).refusals;
        assert!(refusals.contains(&Refusal { kind, reason }));
    }
}
