//! `/metrics` over HTTP, for Prometheus.
//!
//! Responsible for as much of HTTP as a scrape needs. Not responsible for the numbers (`counters.rs`).

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::counters::metrics;
use super::server::Server;

/// Longest request.
const REQUEST_BYTES: usize = 8 << 10;
/// Longest time for one.
const WITHIN: Duration = Duration::from_secs(5);
/// Scrapes at a time; more wait in the system's queue.
const AT_A_TIME: usize = 8;

pub(super) async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Answers scrapes for ever.
pub(super) async fn serve(listener: TcpListener, server: Rc<RefCell<Server>>) {
    let places = std::sync::Arc::new(tokio::sync::Semaphore::new(AT_A_TIME));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let server = Rc::clone(&server);
        tokio::task::spawn_local(async move {
            // A client that is slow or gone gets no answer.
            let _late = tokio::time::timeout(WITHIN, answer(stream, &server)).await;
            drop(place);
        });
    }
}

async fn answer(mut stream: TcpStream, server: &RefCell<Server>) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut bytes = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let count = stream.read(&mut bytes).await?;
        request.extend_from_slice(&bytes[..count]);
        if count == 0 || request.len() > REQUEST_BYTES {
            return Ok(());
        }
    }
    let is_scrape = request.starts_with(b"GET /metrics ") || request.starts_with(b"GET /metrics?");
    let (status, body) = if is_scrape {
        ("200 OK", numbers(&mut server.borrow_mut()))
    } else {
        (
            "404 Not Found",
            "memfit's broker has /metrics only\n".to_owned(),
        )
    };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}

fn numbers(server: &mut Server) -> String {
    metrics(&server.status(), server.clients.len(), server.counters)
}
