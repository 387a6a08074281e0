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
#include "src/base/units.h"

namespace rekindle::worker {

Result<std::unique_ptr<Publication>> Publication::begin(store::SegmentStore& store,
                                                        const std::filesystem::path& parent,
                                                        ModelVersion id, const TensorSet& tensors) {
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < tensors.size(); ++i) {
    boxes.push_back({i, Box::whole(tensors[i].shape)});
  }
  TRY(auto packed, pack_layout(tensors, boxes, store::kMaxSegmentBytes));
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

namespace asio = boost::asio;

namespace {

// Of one client. The memory of a publication is allocated when it begins.
constexpr std::size_t kMostPublications = 4;

}  // namespace

PublicationDesk::PublicationDesk(CopyHost& host, async::TaskGroup& tasks,
                                 std::filesystem::path directory)
    : host_(host), tasks_(tasks), directory_(std::move(directory)) {
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

Result<void> PublicationDesk::commit(const std::shared_ptr<Client>& client,
                                     const proto::WorkerFrame& frame) {
  TRY(auto publication, take(client->id(), frame.session()));
  tasks_.spawn("worker.publish", run_commit(client, frame, std::move(publication)));
  return {};
}

Result<void> PublicationDesk::abandon(const std::shared_ptr<Client>& client,
                                      const proto::WorkerFrame& frame) {
  TRY(auto publication, take(client->id(), frame.session()));
  tasks_.spawn("worker.publish", run_abandon(client, frame, std::move(publication)));
  return {};
}

void PublicationDesk::drop(ClientId client) {
  for (auto it = open_.begin(); it != open_.end();) {
    if (it->second.client != client) {
      ++it;
      continue;
    }
    // A dead trainer's device may write to the files for a while.
    it->second.publication->left_mapped();
    tasks_.spawn("worker.discard", discard(std::move(it->second.publication)));
    close_one(client);
    it = open_.erase(it);
  }
}

Result<PublicationDesk::PublicationPtr> PublicationDesk::take(ClientId client, SessionId number) {
  const auto found = open_.find(number);
  if (found == open_.end() || found->second.client != client) {
    return fail(ErrorCode::kStale, "publication {} is over; begin anew", number);
  }
  auto publication = std::move(found->second.publication);
  open_.erase(found);
  return publication;
}

void PublicationDesk::close_one(ClientId client) {
  const auto count = counts_.find(client);
  if (--count->second == 0) counts_.erase(count);
}

async::Task<void> PublicationDesk::run_begin(std::shared_ptr<Client> client,
                                             proto::WorkerFrame frame, SessionId number) {
  co_await asio::this_coro::throw_if_cancelled(false);
  using Begun = Result<std::shared_ptr<PublicationPtr>>;
  const auto work = [this, &frame]() -> Begun {
    TRY(auto id, rpc::from_proto(frame.publish_begin().id()));
    TRY(const auto tensors, tensors_from(frame.publish_begin()));
    TRY(auto publication, Publication::begin(host_.store(), directory_, std::move(id), tensors));
    return std::make_shared<PublicationPtr>(std::move(publication));
  };
  auto begun = co_await async::offload(host_.blocking_pool(), work);
  if (!begun) {
    close_one(client->id());
    co_return client->send(
        error_frame(frame.call(), 0, std::move(begun).error().with_context("publish")));
  }
  PublicationPtr publication = std::move(**begun);
  auto segments = publication->open_segments();
  if (!segments || client->closed()) {
    auto over = discard(std::move(publication));
    co_await std::move(over);
    close_one(client->id());
    if (!segments) client->send(error_frame(frame.call(), 0, segments.error()));
    co_return;
  }
  proto::AgentFrame answer;
  answer.set_call(frame.call());
  answer.set_session(number);
  answer.set_descriptors(static_cast<std::uint32_t>(segments->size()));
  auto& body = *answer.mutable_publish_begun();
  body.set_layout(publication->layout().serialize());
  for (const auto& segment : publication->layout().segments()) {
    body.add_segment_bytes(segment.size_bytes);
  }
  open_[number] = {client->id(), std::move(publication)};
  client->send(answer, std::move(*segments));
}

async::Task<void> PublicationDesk::run_commit(std::shared_ptr<Client> client,
                                              proto::WorkerFrame frame,
                                              PublicationPtr publication) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const ModelVersion id = publication->id();
  auto filled = publication->filled();
  auto root = co_await host_.publish(id, std::move(filled));
  auto over = discard(std::move(publication));
  co_await std::move(over);
  close_one(client->id());
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
                                               proto::WorkerFrame frame,
                                               PublicationPtr publication) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto over = discard(std::move(publication));
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
