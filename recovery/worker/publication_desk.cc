#include "recovery/worker/publication_desk.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/asio/this_coro.hpp>
#include <stdlib.h>

#include "recovery/rpc/convert.h"
#include "recovery/worker/worker_wire.h"
#include "src/async/offload.h"
#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::worker {

Result<std::unique_ptr<Publication>> Publication::begin(store::SegmentStore& store,
                                                        const std::filesystem::path& parent,
                                                        ModelVersion id, const TensorSet& tensors) {
  std::vector<TensorBox> boxes;
  const std::uint64_t most = store::published_segment_bytes(tensors.total_bytes());
  for (TensorIndex i = 0; i < tensors.size(); ++i) {
    boxes.push_back({i, Box::whole(tensors[i].shape)});
  }
  TRY(auto packed, pack_layout(tensors, boxes, most));
  return begin(store, parent, std::move(id), tensors, std::move(packed));
}

Result<std::unique_ptr<Publication>> Publication::begin(store::SegmentStore& store,
                                                        const std::filesystem::path& parent,
                                                        ModelVersion id, const TensorSet& tensors,
                                                        PackedLayout packed) {
  if (::mkdir(parent.c_str(), 0700) != 0 && errno != EEXIST) {
    return fail_errno(errno, fmt::format("create {}", parent.string()));
  }
  std::string name = (parent / "XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) return fail_errno(errno, "create " + name);
  std::unique_ptr<Publication> publication(
      new Publication(store, std::move(id), tensors, std::move(packed), name));
  const auto segments = publication->packed_.layout.segments();
  const auto& headers = publication->packed_.headers;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    TRY(auto segment,
        store.create_segment(publication->directory_ / segments[i].name, segments[i].size_bytes));
    std::memcpy(segment->writable().data(), headers[i].data(), headers[i].size());
    publication->segments_.push_back(std::move(segment));
  }
  return publication;
}

Publication::~Publication() {
  for (const auto& segment : segments_) {
    if (segment->path().parent_path() != directory_) continue;  // taken over
    segment->end_lease();
    if (left_mapped_) store_.never_reuse(*segment);
    (void)store_.remove_segment(segment->path());
  }
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

Result<std::vector<UniqueFd>> Publication::open_segments() const {
  std::vector<UniqueFd> out;
  for (const auto& segment : packed_.layout.segments()) {
    const auto path = directory_ / segment.name;
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (!fd) return fail_errno(errno, fmt::format("open {}", path.string()));
    out.push_back(std::move(fd));
  }
  return out;
}

void Publication::seal(std::uint32_t segment) {
  sealed_.resize(segments_.size());
  if (!tiles_) {
    auto tiles = TileMap::create(tensors_);
    if (!tiles) return;  // the commit says why
    tiles_ = *std::move(tiles);
  }
  auto sealed = store::seal_segment(filled(), *tiles_, segment, stop_seals_);
  if (!sealed) {
    log::info("worker.seal", "file", segments_[segment]->path().string(), "why", sealed.error());
    return;
  }
  sealed_[segment] = *std::move(sealed);
}

namespace asio = boost::asio;

namespace {

// Of one client. The memory of a publication is allocated when it begins.
constexpr std::size_t kMostPublications = 4;
// For an answer to arrive.
constexpr std::chrono::milliseconds kAnswerTime{500};
// Of a call of a rank that names no deadline.
constexpr std::chrono::minutes kPatience{10};

// A rank waits for the others. Its call ends before the rank gives up, so that it hears the reason.
TimePoint give_up(const proto::WorkerFrame& frame) {
  const std::chrono::milliseconds asked(frame.deadline_ms());
  if (asked.count() == 0) return steady_now() + kPatience;
  return steady_now() + asked - std::min<std::chrono::milliseconds>(asked / 10, kAnswerTime);
}

}  // namespace

PublicationDesk::PublicationDesk(CopyHost& host, asio::any_io_executor executor,
                                 async::TaskGroup& tasks, std::filesystem::path directory)
    : host_(host), executor_(std::move(executor)), tasks_(tasks), directory_(std::move(directory)) {
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

Result<void> PublicationDesk::begin(const std::shared_ptr<Client>& client,
                                    const proto::WorkerFrame& frame, SessionId number) {
  const auto count = counts_.find(client->id());
  if (count != counts_.end() && count->second >= kMostPublications) {
    return fail(ErrorCode::kExhausted,
                "this worker has {} publications under way; commit or abandon one", count->second);
  }
  ++counts_[client->id()];
  tasks_.spawn("worker.publish", run_begin(client, frame, number));
  return {};
}

Result<void> PublicationDesk::written(const std::shared_ptr<Client>& client,
                                      const proto::WorkerFrame& frame) {
  TRY(Entry* const entry, find(client->id(), frame.session()));
  const std::uint32_t segment = frame.publish_written().segment();
  if (segment >= entry->publication->layout().segments().size()) {
    return fail(ErrorCode::kInvalid, "publication {} has no segment {}", frame.session(), segment);
  }
  if (entry->seals == nullptr) entry->seals = std::make_shared<Seals>(executor_);
  if (!entry->seals->written.insert(segment).second) {
    return fail(ErrorCode::kInvalid, "segment {} of publication {} was written already", segment,
                frame.session());
  }
  to_seal_.emplace_back(frame.session(), segment);
  if (!std::exchange(seals_run_, true)) tasks_.spawn("worker.seal", run_seals());
  client->send(done_frame(frame.call(), frame.session()));
  return {};
}

async::Task<void> PublicationDesk::run_seals() {
  co_await asio::this_coro::throw_if_cancelled(false);
  bool cancelled = false;
  while (!to_seal_.empty() && !cancelled) {
    const auto [number, segment] = to_seal_.front();
    to_seal_.pop_front();
    const auto entry = open_.find(number);
    if (entry == open_.end()) continue;
    auto sealed = seal(number, entry->second.publication, entry->second.seals, segment);
    co_await std::move(sealed);
    cancelled = co_await async::is_cancelled();
  }
  seals_run_ = false;
}

async::Task<void> PublicationDesk::seal(SessionId number, PublicationPtr publication,
                                        std::shared_ptr<Seals> seals, std::uint32_t segment) {
  co_await asio::this_coro::throw_if_cancelled(false);
  seals->running = true;
  auto work = [publication, segment] {
    publication->seal(segment);
    return true;
  };
  auto sealed = async::offload(host_.blocking_pool(), std::move(work));
  (void)co_await std::move(sealed);
  seals->running = false;
  seals->ended.notify();
  // If the trainer is gone, this may be the last reference to its files.
  if (open_.contains(number)) co_return;
  auto over = discard(std::move(publication));
  co_await std::move(over);
}

async::Task<bool> PublicationDesk::end_seals(std::shared_ptr<Seals> seals, TimePoint deadline) {
  bool cancelled = false;
  while (seals->running && !cancelled && steady_now() < deadline) {
    co_await seals->ended.wait_until(deadline);
    cancelled = co_await async::is_cancelled();
  }
  co_return !seals->running;
}

Result<void> PublicationDesk::commit(const std::shared_ptr<Client>& client,
                                     const proto::WorkerFrame& frame) {
  TRY(Entry entry, take(client->id(), frame.session()));
  tasks_.spawn("worker.publish", run_commit(client, frame, std::move(entry)));
  return {};
}

Result<void> PublicationDesk::abandon(const std::shared_ptr<Client>& client,
                                      const proto::WorkerFrame& frame) {
  TRY(Entry entry, take(client->id(), frame.session()));
  leave(frame.session(), entry);
  entry.publication->stop_seals();
  tasks_.spawn("worker.publish", run_abandon(client, frame, std::move(entry)));
  return {};
}

void PublicationDesk::leave(SessionId number, const Entry& entry) {
  if (entry.rank) host_.joint()->leave(entry.rank->id, entry.rank->rank, number);
}

void PublicationDesk::drop(ClientId client) {
  for (auto it = open_.begin(); it != open_.end();) {
    Entry& entry = it->second;
    if (entry.client != client) {
      ++it;
      continue;
    }
    leave(it->first, entry);
    if (entry.publication == nullptr) {  // run_begin() ends it
      ++it;
      continue;
    }
    entry.publication->stop_seals();
    // A dead trainer's device may write to the files for a while.
    entry.publication->left_mapped();
    tasks_.spawn("worker.discard", discard(std::move(entry.publication)));
    close_one(client);
    it = open_.erase(it);
  }
}

Result<PublicationDesk::Entry*> PublicationDesk::find(ClientId client, SessionId number) {
  const auto found = open_.find(number);
  if (found == open_.end() || found->second.client != client ||
      found->second.publication == nullptr) {
    return fail(ErrorCode::kStale, "publication {} is over; begin anew", number);
  }
  return &found->second;
}

Result<PublicationDesk::Entry> PublicationDesk::take(ClientId client, SessionId number) {
  TRY(Entry* const found, find(client, number));
  Entry entry = std::move(*found);
  open_.erase(number);
  return entry;
}

void PublicationDesk::close_one(ClientId client) {
  const auto count = counts_.find(client);
  if (--count->second == 0) counts_.erase(count);
}

Result<PublicationDesk::PublicationPtr> PublicationDesk::begin_whole(
    const proto::PublishBegin& request) {
  TRY(auto id, rpc::from_proto(request.id()));
  TRY(const auto tensors, tensors_from(request));
  return Publication::begin(host_.store(), directory_, std::move(id), tensors);
}

// Waits for all ranks, and then makes the files.
async::Task<Result<PublicationDesk::PublicationPtr>> PublicationDesk::begin_rank(
    std::shared_ptr<Client> client, const proto::WorkerFrame& frame, SessionId number) {
  const proto::PublishBegin& request = frame.publish_begin();
  if (host_.joint() == nullptr) {
    co_return fail(ErrorCode::kUnavailable, "this agent takes no part in joint publications");
  }
  CO_TRY(const ModelVersion id, rpc::from_proto(request.id()));
  open_.at(number).rank = Rank{id, request.rank()};
  CO_TRY(auto declaration, co_await async::offload(host_.blocking_pool(), [&request] {
           return declaration_from(request);
         }));
  // From here on drop() ends the wait of a rank that is gone.
  if (client->closed()) co_return fail(ErrorCode::kPeerLost, "the rank is gone");
  CO_TRY(auto places, co_await host_.joint()->declare(id, request.world(), std::move(declaration),
                                                      number, give_up(frame)));
  const auto work = [this, &id, &places]() -> Result<std::shared_ptr<PublicationPtr>> {
    TRY(auto publication, Publication::begin(host_.store(), directory_, id, places.tensors,
                                             std::move(places.packed)));
    return std::make_shared<PublicationPtr>(std::move(publication));
  };
  CO_TRY(const auto begun, co_await async::offload(host_.blocking_pool(), work));
  co_return std::move(*begun);
}

async::Task<void> PublicationDesk::run_begin(std::shared_ptr<Client> client,
                                             proto::WorkerFrame frame, SessionId number) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const bool joint = frame.publish_begin().world() > 0;
  open_[number].client = client->id();
  Result<PublicationPtr> begun = fail(ErrorCode::kInternal, "not begun");
  if (joint) {
    begun = co_await begin_rank(client, frame, number);
  } else {
    const auto work = [this, &frame]() -> Result<std::shared_ptr<PublicationPtr>> {
      TRY(auto publication, begin_whole(frame.publish_begin()));
      return std::make_shared<PublicationPtr>(std::move(publication));
    };
    auto made = co_await async::offload(host_.blocking_pool(), work);
    if (made) {
      begun = std::move(**made);
    } else {
      begun = fail(std::move(made).error().with_context("publish"));
    }
  }
  Result<std::vector<UniqueFd>> segments = std::vector<UniqueFd>();
  if (begun) segments = (*begun)->open_segments();
  if (!begun || !segments || client->closed()) {
    leave(number, open_.at(number));
    open_.erase(number);
    if (begun) {
      auto over = discard(*std::move(begun));
      co_await std::move(over);
    }
    close_one(client->id());
    if (!begun) {
      client->send(error_frame(frame.call(), 0, begun.error()));
    } else if (!segments) {
      client->send(error_frame(frame.call(), 0, segments.error()));
    }
    co_return;
  }
  const PublicationPtr& publication = open_.at(number).publication = *std::move(begun);
  proto::AgentFrame answer;
  answer.set_call(frame.call());
  answer.set_session(number);
  answer.set_descriptors(static_cast<std::uint32_t>(segments->size()));
  auto& body = *answer.mutable_publish_begun();
  body.set_layout(publication->layout().serialize());
  for (const auto& segment : publication->layout().segments()) {
    body.add_segment_bytes(segment.size_bytes);
  }
  if (joint) body.set_tensor_set(publication->tensors().serialize());
  client->send(answer, std::move(*segments));
}

async::Task<Result<Digest>> PublicationDesk::publish(const proto::WorkerFrame& frame,
                                                     const Entry& entry) {
  // The rest is digested with the publication, at the usual priority.
  entry.publication->stop_seals();
  bool sealed = true;
  if (entry.seals != nullptr) {
    auto end = end_seals(entry.seals, give_up(frame));
    sealed = co_await std::move(end);
  }
  if (!sealed) {
    leave(frame.session(), entry);
    co_return fail(ErrorCode::kTimeout, "publish {}: its segments were not digested in time",
                   entry.publication->id().to_string());
  }
  auto filled = entry.publication->filled();
  const ModelVersion id = entry.publication->id();
  if (!entry.rank) co_return co_await host_.publish(id, std::move(filled));
  co_return co_await host_.joint()->commit(id, entry.rank->rank, frame.session(), std::move(filled),
                                           entry.publication, give_up(frame));
}

async::Task<void> PublicationDesk::run_commit(std::shared_ptr<Client> client,
                                              proto::WorkerFrame frame, Entry entry) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const ModelVersion id = entry.publication->id();
  auto root = co_await publish(frame, entry);
  auto over = discard(std::move(entry.publication));
  co_await std::move(over);
  close_one(client->id());
  host_.publication_ended({client->uid(), client->pid()}, id,
                          root ? Result<void>() : fail(root.error()));
  if (!root) co_return client->send(error_frame(frame.call(), frame.session(), root.error()));
  proto::AgentFrame answer;
  answer.set_call(frame.call());
  answer.set_session(frame.session());
  *answer.mutable_published()->mutable_id() = rpc::to_proto(id);
  *answer.mutable_published()->mutable_root() = rpc::to_proto(*root);
  client->send(answer);
}

// Answers when the files are removed.
async::Task<void> PublicationDesk::run_abandon(std::shared_ptr<Client> client,
                                               proto::WorkerFrame frame, Entry entry) {
  co_await asio::this_coro::throw_if_cancelled(false);
  if (entry.seals != nullptr) {
    auto end = end_seals(entry.seals, give_up(frame));
    (void)co_await std::move(end);
  }
  auto over = discard(std::move(entry.publication));
  co_await std::move(over);
  close_one(client->id());
  client->send(done_frame(frame.call(), 0));
}

// Freeing many GiB of pages takes seconds, so the pool does it.
async::Task<void> PublicationDesk::discard(PublicationPtr publication) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto work = [doomed = std::move(publication)]() mutable {
    doomed.reset();
    return true;
  };
  auto freed = async::offload(host_.blocking_pool(), std::move(work));
  (void)co_await std::move(freed);
}

}  // namespace rekindle::worker
