#include "recovery/agent/publisher.h"

#include <utility>

#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/async/offload.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/tensor/signature_wire.h"

namespace rekindle::agent {

using async::Task;

namespace {

constexpr std::chrono::milliseconds kCoordinatorWait{3000};
constexpr std::chrono::milliseconds kClaimDeadline{3000};

}  // namespace

PublishMetrics::PublishMetrics(metrics::Metrics& metrics)
    : outcomes_(metrics.counters("rekindle_publishes_total",
                                 "Publications of whole versions that have ended, by result.")),
      took_(metrics::add_seconds(metrics.histograms("rekindle_publish_seconds",
                                                    "How long publications took that succeeded."))),
      bytes_(metrics.counter("rekindle_published_bytes_total",
                             "Payload bytes of publications that succeeded.")) {}

void PublishMetrics::count(const Result<TransferSummary>& published, Duration took) {
  if (!published) return outcomes_.count(fail(published.error()));
  outcomes_.count({});
  metrics::observe(took_, took);
  bytes_.Increment(static_cast<double>(published->bytes));
}

Task<Result<TransferSummary>> Publisher::publish(PublishRequest request, OnProgress progress) {
  Order order;
  order.id = request.id;
  order.replicas = request.replicas;
  order.signatures = std::move(request.signatures);
  order.stage = [this, id = request.id, paths = std::move(request.paths)](const OnBytes& on_bytes) {
    return parts_.store.stage(id, paths, on_bytes);
  };
  order.progress = std::move(progress);
  order.parent = request.trace;
  return run(std::move(order));
}

Task<Result<TransferSummary>> Publisher::publish_filled(ModelVersion id,
                                                        store::FilledSegments filled) {
  Order order;
  order.id = id;
  order.of_workers = true;
  // Stage is copyable, the segments are not. It is called once.
  auto shared = std::make_shared<store::FilledSegments>(std::move(filled));
  order.stage = [this, id, shared](const OnBytes& on_bytes) {
    return parts_.store.stage_segments(id, std::move(*shared), on_bytes);
  };
  return run(std::move(order));
}

Task<Result<TransferSummary>> Publisher::run(Order order) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const TimePoint started = steady_now();
  trace::RunningSpan span(tracer_, "publish", order.parent);
  span.set(std::string(trace::kOperation), "publish");
  span.set(std::string(trace::kSubject), order.id.to_string());
  order.parent = span.context();
  auto running = run_once(std::move(order), started);
  auto published = co_await std::move(running);
  if (published) span.set("rekindle.bytes", published->bytes);
  span.end(published);
  if (metrics_ != nullptr) metrics_->count(published, steady_now() - started);
  co_return published;
}

Task<Result<TransferSummary>> Publisher::run_once(Order order, TimePoint started) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  auto stored = co_await stage_and_commit(order);
  if (!stored) {
    co_return fail(std::move(stored).error().with_context("publish " + order.id.to_string()));
  }
  CO_TRY_VOID(co_await sources_.commit(*stored, "published"));
  const Manifest& manifest = (*stored)->manifest;
  TransferSummary summary;
  summary.id = order.id;
  summary.root = manifest.checkpoint->root;
  summary.layout = manifest.layout.digest();
  summary.signatures = manifest.checkpoint->signatures;
  summary.path = (*stored)->directory;
  summary.bytes = manifest.layout.payload_bytes();
  summary.tensors = count_tensors(manifest.checkpoint->tensors, manifest.layout);
  summary.elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(steady_now() - started);
  log::info("publish.ready", "version", order.id.to_string(), "root", summary.root.hex(), "bytes",
            summary.bytes);
  co_return summary;
}

Publisher::OnBytes Publisher::report_to(const Order& order) const {
  return [executor = executor_, id = order.id, progress = order.progress,
          started = steady_now()](const store::PublishProgress& bytes) {
    if (!progress) return;
    Progress update;
    update.phase = "copy";
    update.id = id;
    update.bytes_done = bytes.bytes_done;
    update.bytes_total = bytes.bytes_total;
    const double elapsed = seconds(steady_now() - started);
    update.bytes_per_second = elapsed > 0 ? static_cast<double>(bytes.bytes_done) / elapsed : 0;
    // The store calls this on its copying threads.
    boost::asio::post(executor, [progress, update] { progress(update); });
  };
}

Task<Result<std::shared_ptr<const store::StoredVersion>>> Publisher::stage_and_commit(
    Order& order) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  CO_TRY_VOID(retirement_.check_not_retiring(order.id));
  trace::RunningSpan phase(tracer_, "copy", order.parent);
  CO_TRY(const Staged staged,
         co_await async::offload(parts_.blocking_pool, [&]() -> Result<Staged> {
           TRY(auto made, order.stage(report_to(order)));
           TRY_VOID(sign(order, *made));
           return made;
         }));
  // A publication that is cancelled ends here. After the claim it is carried through, because the
  // fleet has heard of it. Nor does it go on while a retire of the version would take the new copy
  // along.
  phase = trace::RunningSpan(tracer_, "claim", order.parent);
  Result<void> claimed = fail(ErrorCode::kUnavailable, "cancelled; nothing was published");
  if (!co_await async::is_cancelled()) claimed = retirement_.check_not_retiring(order.id);
  if (claimed) {
    claimed = co_await claim(parts_.store.staged_manifest(*staged).checkpoint, order.replicas, {},
                             phase.context());
  }
  if (!claimed) {
    co_await async::offload(parts_.blocking_pool, [&] {
      parts_.store.discard_staged(staged);
      return true;
    });
    co_return fail(std::move(claimed).error());
  }
  phase = trace::RunningSpan(tracer_, "commit", order.parent);
  co_return co_await async::offload(parts_.blocking_pool,
                                    [&] { return parts_.store.commit_staged(staged); });
}

std::vector<VersionSignature> Publisher::sign_for_workers(const ModelVersion& id,
                                                          const Digest& root) const {
  if (!parts_.publishers.sign_key) return {};
  return {sign_version(*parts_.publishers.sign_key, id, root)};
}

Result<void> Publisher::sign(const Order& order, store::SegmentStore::Staged& staged) const {
  const Checkpoint& checkpoint = *parts_.store.staged_manifest(staged).checkpoint;
  auto signatures = order.signatures;
  for (const VersionSignature& one : signatures) {
    if (is_valid(one, checkpoint.id, checkpoint.root)) continue;
    return fail(ErrorCode::kCorrupt,
                "the signature of key {} is of other bytes than those in the files (root {}): "
                "publish again when nobody writes to them",
                crypto::key_id(one.public_key), checkpoint.root.hex());
  }
  if (order.of_workers) add_signatures(signatures, sign_for_workers(order.id, checkpoint.root));
  return parts_.store.sign_staged(staged, signatures);
}

Task<Result<void>> Publisher::claim(std::shared_ptr<const Checkpoint> checkpoint,
                                    std::optional<std::uint32_t> replicas,
                                    std::vector<Digest> parts, trace::Context parent) {
  CO_TRY_VOID(
      parts_.publishers.trust.check(checkpoint->id, checkpoint->root, checkpoint->signatures));
  if (!parts_.link.configured()) co_return Result<void>();
  CO_TRY(const auto client, co_await parts_.link.wait_connected(kCoordinatorWait));
  proto::PublishRequest request;
  request.set_node_id(parts_.identity.node_id);
  request.set_incarnation(parts_.identity.incarnation.to_bytes());
  *request.mutable_id() = rpc::to_proto(checkpoint->id);
  *request.mutable_root() = rpc::to_proto(checkpoint->root);
  *request.mutable_tensor_set() = rpc::to_proto(checkpoint->tensors.digest());
  request.set_checkpoint_bytes(checkpoint->tensors.total_bytes());
  *request.mutable_signatures() = to_proto(checkpoint->signatures);
  if (replicas) request.set_replicas(*replicas);
  for (const Digest& part : parts) *request.add_parts() = rpc::to_proto(part);
  const auto answer = co_await rpc::call<proto::COORDINATOR_PUBLISH>(client, std::move(request),
                                                                     kClaimDeadline, parent);
  if (!answer) co_return fail(answer.error());
  co_return Result<void>();
}

}  // namespace rekindle::agent
