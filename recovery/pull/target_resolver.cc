#include "recovery/pull/target_resolver.h"

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "recovery/pull/pull_plans.h"
#include "recovery/pull/tile_verifier.h"
#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::pull {

namespace {

constexpr std::string_view kConfigFile = "config.json";

// Collects why no copy of config.json could be read. Bytes that are wrong say more than a source
// that has none.
class ConfigFailure {
 public:
  void add(const std::string& source, Error cause) {
    const bool wrong = cause.code() != ErrorCode::kNotFound;
    if (wrong) log::warn("pull.config", "source", source, "error", cause);
    if (!why_ || (wrong && why_->code() == ErrorCode::kNotFound)) {
      why_ = std::move(cause).with_context(source);
    }
  }
  std::string message() const { return why_ ? why_->message() : "no source"; }

 private:
  std::optional<Error> why_;
};

}  // namespace

TargetResolver::TargetResolver(PullContext& context, SourcePool& sources, const WantedSpec& wanted)
    : context_(context), sources_(sources), wanted_(wanted), target_(context.target) {}

async::Task<Result<void>> TargetResolver::resolve() {
  const PullRequest& request = context_.request;
  PullProgress& progress = context_.progress;
  progress.show();
  // With something else to read from there is no reason to wait for holders.
  const bool has_fallback = !request.fallback.empty() && request.ref.version;
  const auto& times = context_.times;
  const SourceFinder::Patience patience{times.resolve,
                                        has_fallback ? times.resolve : times.verifying};
  const auto tell = [&](const Error& why) {
    progress.trace().wait_for("holders");
    progress.show("waiting: " + why.message());
  };
  auto resolved = co_await context_.finder.resolve(patience, tell);
  if (resolved) {
    target_.resolved = std::move(*resolved);
  } else {
    if (!has_been_asked(resolved.error())) take_from_store();
    if (!target_.resolved.root.is_nil()) {
      progress.show(fmt::format("{}; using what this host holds", resolved.error().message()));
    } else if (has_fallback) {
      progress.show(
          fmt::format("{}; reading {}", resolved.error().message(), request.fallback.string()));
      CO_TRY_VOID(co_await take_from_fallback());
    } else {
      co_return fail(std::move(resolved).error());
    }
  }
  co_return check_root();
}

// A coordinator or peer that answers no (the version is retired, say) knows better than this host.
bool TargetResolver::has_been_asked(const Error& answer) const {
  if (answer.code() == ErrorCode::kPeerLost || answer.code() == ErrorCode::kTimeout) return false;
  if (answer.code() == ErrorCode::kDenied) return true;
  return !context_.request.from.empty() || context_.environment.coordinator() != nullptr;
}

// The wanted version in the own store, or the newest one.
void TargetResolver::take_from_store() {
  const ModelRef& ref = context_.request.ref;
  for (const auto& stored : context_.environment.store->versions()) {
    const auto& known = *stored->manifest.checkpoint;
    if (known.id.model != ref.model) continue;
    const bool fits = ref.version ? known.id.version == *ref.version
                                  : known.id.version >= target_.resolved.id.version;
    if (!fits) continue;
    target_.resolved = {known.id, known.root, known.tensors.digest(), known.tensors.total_bytes(),
                        known.signatures};
  }
  context_.progress.set_version(target_.resolved.id);
}

async::Task<Result<void>> TargetResolver::take_from_fallback() {
  target_.resolved.id = {context_.request.ref.model, *context_.request.ref.version};
  CO_TRY_VOID(co_await sources_.add_fallback());
  target_.resolved.root = target_.checkpoint->root;
  target_.resolved.tensor_set = target_.checkpoint->tensors.digest();
  target_.resolved.checkpoint_bytes = target_.checkpoint->tensors.total_bytes();
  co_return Result<void>();
}

Result<void> TargetResolver::check_root() {
  Resolved& resolved = target_.resolved;
  context_.progress.set_version(resolved.id);
  const Digest& wanted = context_.request.root;
  if (wanted.is_nil() || wanted == resolved.root) {
    const PublisherTrust* agent = context_.environment.trust;
    if (agent != nullptr) TRY_VOID(agent->check(resolved.id, resolved.root, resolved.signatures));
    return context_.request.trust.check(resolved.id, resolved.root, resolved.signatures);
  }
  return fail(ErrorCode::kCorrupt, "{} has root {} there, and not {}: nothing was fetched",
              target_.resolved.id.to_string(), target_.resolved.root.hex(), wanted.hex());
}

async::Task<Result<void>> TargetResolver::find_wanted() {
  context_.progress.enter_phase("plan", steady_now());
  context_.progress.show();
  context_.silence.heard(steady_now());
  if (context_.request.mend != nullptr) {
    CO_TRY_VOID(take_layout(*context_.request.mend));
  } else {
    CO_TRY_VOID(co_await learn_checkpoint());
    target_.checkpoint =
        with_signatures(std::move(target_.checkpoint), target_.resolved.signatures);
    std::string config;
    if (wanted_.needs_config()) {
      CO_TRY(config, co_await read_config());
    }
    auto making =
        context_.environment.plans->wanted(target_.checkpoint, wanted_, std::move(config));
    CO_TRY(target_.wanted, co_await context_.wait_for(std::move(making)));
  }
  context_.progress.set_total(target_.layout().payload_bytes());
  co_return Result<void>();
}

Result<void> TargetResolver::take_layout(const store::SetAside& copy) {
  if (copy.checkpoint->root != target_.resolved.root) {
    return fail(ErrorCode::kCorrupt, "{} has root {} in the fleet, the copy here has {}",
                target_.resolved.id.to_string(), target_.resolved.root.hex(),
                copy.checkpoint->root.hex());
  }
  target_.checkpoint = with_signatures(copy.checkpoint, target_.resolved.signatures);
  target_.wanted = std::make_shared<const PackedLayout>(copy.packed);
  return {};
}

// In a copy of the own store, or in the tables of other pulls.
bool TargetResolver::find_checkpoint() {
  const Resolved& resolved = target_.resolved;
  for (const auto& stored : context_.environment.store->find(resolved.id)) {
    if (stored->manifest.checkpoint->root != resolved.root) continue;
    target_.checkpoint = stored->manifest.checkpoint;
  }
  if (target_.checkpoint == nullptr) {
    target_.checkpoint = context_.environment.plans->find_checkpoint(resolved.id, resolved.root);
  }
  return target_.checkpoint != nullptr;
}

// From this host, from the first peer that can say, or from the fallback directory.
async::Task<Result<void>> TargetResolver::learn_checkpoint() {
  const Resolved& resolved = target_.resolved;
  if (find_checkpoint()) co_return Result<void>();
  Error last_error{ErrorCode::kNotFound, "no source can be reached"};
  co_await sources_.connect();
  while (true) {
    context_.progress.trace().go_on();
    auto learned = co_await ask_for_checkpoint();
    sources_.forget_lost();
    if (learned) co_return learned;
    last_error = std::move(learned).error();
    const bool cancelled = co_await async::is_cancelled();
    if (cancelled || context_.silence.over(steady_now())) break;
    co_await sources_.wait_to_ask_again();
    co_await sources_.look();
  }
  const auto& fallback = context_.request.fallback;
  if (!fallback.empty()) {
    context_.progress.show(fmt::format("no source is left; reading {}", fallback.string()));
    co_return co_await sources_.add_fallback();
  }
  co_return fail(ErrorCode::kNotFound, "NO_SOURCE: nobody can say what {} consists of: {}",
                 resolved.id.to_string(), last_error.message());
}

async::Task<Result<void>> TargetResolver::ask_for_checkpoint() {
  const Digest& root = target_.resolved.root;
  PullPlans& plans = *context_.environment.plans;
  if (plans.turns().taken(root)) context_.progress.trace().wait_for("host");
  const auto turn = co_await plans.turns().take(root, context_.silence);
  context_.progress.trace().go_on();
  // Another pull may have fetched it meanwhile.
  if (find_checkpoint()) co_return Result<void>();
  const auto anybody = [](const ActiveSource&) { return true; };
  const auto fetch = [&](const ActiveSource& source) {
    return fetch_checkpoint(source.peer, turn.get());
  };
  const auto failed = [&](ActiveSource& source, const Error& why) {
    log::warn("pull.metadata", "source", source.name, "error", why);
    sources_.lose(source, why);
  };
  CO_TRY(target_.checkpoint,
         co_await sources_.ask<std::shared_ptr<const Checkpoint>>(anybody, fetch, failed));
  co_return Result<void>();
}

async::Task<Result<std::shared_ptr<const Checkpoint>>> TargetResolver::fetch_checkpoint(
    std::shared_ptr<SourcePeer> peer, FetchTurns::Turn* turn) {
  const Resolved& resolved = target_.resolved;
  PullPlans::CheckpointBytes bytes;
  bytes.tensor_set = resolved.tensor_set;
  bytes.signatures = resolved.signatures;
  CO_TRY(bytes.tensors,
         co_await peer->fetch_tensor_set(resolved.tensor_set, sources_.paging(turn)));
  CO_TRY(bytes.tile_digests,
         co_await peer->fetch_tile_digests(resolved.root, sources_.paging(turn)));
  turn->arrived();
  auto parsing = context_.environment.plans->parse(resolved.id, resolved.root, std::move(bytes));
  co_return co_await context_.wait_for(std::move(parsing));
}

async::Task<Result<std::string>> TargetResolver::fetch_config(std::shared_ptr<SourcePeer> peer,
                                                              TensorIndex tensor) {
  const Checkpoint& checkpoint = *target_.checkpoint;
  CO_TRY(std::string content,
         co_await peer->fetch_file(checkpoint.root, std::string(kConfigFile), sources_.paging()));
  CO_TRY_VOID(check_file(checkpoint, tensor, content));
  co_return content;
}

// From the own copies first, then from peers, then from the fallback. A copy of the file that
// cannot be read or does not match its leaves is passed over.
async::Task<Result<std::string>> TargetResolver::read_config() {
  const Checkpoint& checkpoint = *target_.checkpoint;
  const auto tensor = checkpoint.tensors.find(std::string(kFileTensorPrefix).append(kConfigFile));
  if (!tensor) co_return std::string();
  ConfigFailure failure;
  for (const auto& stored : context_.environment.store->find(checkpoint.id)) {
    if (stored->manifest.checkpoint->root != checkpoint.root) continue;
    auto content =
        read_verified_file(checkpoint, stored->manifest.layout, *tensor,
                           [&](const LayoutEntry& entry) { return stored->array(entry); });
    if (content) co_return content;
    failure.add(stored->directory.string(), std::move(content).error());
  }
  co_await sources_.connect();
  const auto anybody = [](const ActiveSource&) { return true; };
  const auto fetch = [&](const ActiveSource& source) { return fetch_config(source.peer, *tensor); };
  const auto failed = [&](const ActiveSource& source, const Error& why) {
    failure.add(source.name, why);
  };
  auto told = co_await sources_.ask<std::string>(anybody, fetch, failed);
  if (told) co_return told;
  if (sources_.has_fallback()) {
    if (auto added = co_await sources_.add_fallback(); !added) {
      failure.add(context_.request.fallback.string(), std::move(added).error());
    }
  }
  for (const auto& source : sources_.sources()) {
    if (source.local_segments.empty()) continue;
    const auto array_of = [&](const LayoutEntry& entry) {
      const std::uint64_t element_bytes = dtype_size_bytes(checkpoint.tensors[*tensor].dtype);
      return source.local_segments[entry.segment].subspan(entry.offset_bytes,
                                                          entry.box.elements() * element_bytes);
    };
    auto content = read_verified_file(checkpoint, *source.layout, *tensor, array_of);
    if (content) co_return content;
    failure.add(source.name, std::move(content).error());
  }
  co_return fail(ErrorCode::kNotFound,
                 "NO_SOURCE: nobody has the config.json of {} that --shard needs: {}",
                 checkpoint.id.to_string(), failure.message());
}

}  // namespace rekindle::pull
