//! `memfit show` on a trace: what was recorded and what is in it.

use super::sections::{indented, section};
use crate::printer::Palette;
use crate::report::document::TraceDocument;
use crate::report::table::{Align, Table};
use crate::report::words;

/// The whole report.
pub(crate) fn trace(document: &TraceDocument, palette: Palette) -> String {
    let step = match (document.training, document.optimizer.as_str()) {
        (false, _) => "inference step".to_owned(),
        (true, "") => "training step without optimizer".to_owned(),
        (true, optimizer) => format!("training step, {optimizer}"),
    };
    let captured = match document.captured.as_str() {
        "fake" => "with fake tensors: no memory was taken",
        "real" => "by running one real step",
        other => other,
    };
    let mut facts = Table::new(&[Align::Left, Align::Left]);
    let batch = match document.batch {
        0 => String::new(),
        batch => format!(", batch {batch}"),
    };
    facts.row([
        "Step".to_owned(),
        format!("{step}{batch}, on {}", document.device_kind),
    ]);
    facts.row([
        "Captured".to_owned(),
        format!("{captured}, torch {}", document.torch_version),
    ]);
    facts.row(["Other batch sizes".to_owned(), batches(document)]);
    facts.row(["Splitting the batch".to_owned(), splitting(document)]);
    let mut text = format!(
        "{}  trace, schema version {}\n\n{}",
        palette.strong(&document.target),
        memfit_engine::trace::SCHEMA_VERSION,
        facts.render(0, Palette::PLAIN)
    );
    section(&mut text, "Ops", &ops(document, palette), palette);
    section(
        &mut text,
        "Allocations of the whole step",
        &allocations(document, palette),
        palette,
    );
    let mut rest = Table::new(&[Align::Right, Align::Left]);
    rest.row([document.value_count.to_string(), "values".to_owned()]);
    rest.row([
        document.saved_tensor_count.to_string(),
        "saved tensors".to_owned(),
    ]);
    rest.row([document.region_count.to_string(), "module calls".to_owned()]);
    rest.row([
        document.parameter_update_count.to_string(),
        "trainable parameters".to_owned(),
    ]);
    section(
        &mut text,
        "Also recorded",
        &rest.render(2, palette),
        palette,
    );
    let notes = indented(&document.notes);
    section(&mut text, "Notes", &notes, palette);
    text
}

fn batches(document: &TraceDocument) -> String {
    if document.batch_law_known {
        "can be predicted from this trace".to_owned()
    } else {
        "cannot be predicted: the sizes of some allocations are known for this batch only"
            .to_owned()
    }
}

fn splitting(document: &TraceDocument) -> String {
    match &document.couplings {
        None => "unknown: only one batch size was captured".to_owned(),
        Some(couplings) if couplings.is_empty() => {
            "possible: examples do not depend on each other".to_owned()
        }
        Some(couplings) => format!(
            "not possible: examples depend on each other in {}",
            words::counted(couplings.len() as u64, "op")
        ),
    }
}

fn ops(document: &TraceDocument, palette: Palette) -> String {
    let columns = [
        Align::Left,
        Align::Right,
        Align::Right,
        Align::Right,
        Align::Right,
    ];
    let mut table =
        Table::new(&columns).header(["phase", "ops", "random", "GFLOPs", "bytes moved"]);
    for phase in &document.phases {
        #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
        let gigaflops = phase.flops as f64 / 1e9;
        table.row([
            words::phase(phase.phase).to_owned(),
            phase.op_count.to_string(),
            phase.random_op_count.to_string(),
            format!("{gigaflops:.1}"),
            phase.moved_bytes.to_string(),
        ]);
    }
    if table.is_empty() {
        String::new()
    } else {
        table.render(2, palette)
    }
}

fn allocations(document: &TraceDocument, palette: Palette) -> String {
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right])
        .header(["category", "count", "bytes"]);
    for category in &document.categories {
        table.row([
            words::category(category.category),
            category.allocation_count.to_string(),
            category.bytes.to_string(),
        ]);
    }
    if table.is_empty() {
        String::new()
    } else {
        table.render(2, palette)
    }
}
