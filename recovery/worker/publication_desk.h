#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/worker.pb.h"
#include "recovery/worker/agent_host.h"
#include "recovery/worker/core/worker_session.h"
#include "recovery/worker/worker_connections.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/store/segment_store.h"
#include "src/tensor/layout.h"
#include "src/tensor/tensor_set.h"

namespace rekindle::worker {

// A version that a trainer writes, into files of the store's file system that it maps. At the
// commit the store takes over the files that the trainer has let go of, and copies the others. The
// calls block.
class Publication {
 public:
  // Creates files with all their pages in a new directory below `parent`. A lack of memory shows
  // here as kExhausted, and not later as SIGBUS. The content of the files is undefined.
  static Result<std::unique_ptr<Publication>> begin(store::SegmentStore& store,
                                                    const std::filesystem::path& parent,
                                                    ModelVersion id, const TensorSet& tensors);
  // The same for the part of a version that `packed` describes.
  static Result<std::unique_ptr<Publication>> begin(store::SegmentStore& store,
                                                    const std::filesystem::path& parent,
                                                    ModelVersion id, const TensorSet& tensors,
                                                    PackedLayout packed);
  // Removes the files that the store has not taken over.
  ~Publication();
  Publication(const Publication&) = delete;
  Publication& operator=(const Publication&) = delete;

  const ModelVersion& id() const { return id_; }
  const TensorSet& tensors() const { return tensors_; }
  const Layout& layout() const { return packed_.layout; }
  Result<std::vector<UniqueFd>> open_segments() const;  // for writing
  store::FilledSegments filled() const { return {tensors_, packed_, segments_, sealed_}; }
  // The trainer has written a segment and let go of it: digests it now, where nothing speaks
  // against that, until stop_seals(). One call at a time, and none together with filled().
  void seal(std::uint32_t segment);
  void stop_seals() { stop_seals_ = true; }  // any thread
  // The trainer did not say that it is done, so the store must not reuse the files.
  void left_mapped() { left_mapped_ = true; }

 private:
  Publication(store::SegmentStore& store, ModelVersion id, const TensorSet& tensors,
              PackedLayout packed, std::filesystem::path directory)
      : store_(store),
        id_(std::move(id)),
        tensors_(tensors),
        packed_(std::move(packed)),
        directory_(std::move(directory)) {}
  store::SegmentStore& store_;
  std::vector<std::shared_ptr<store::MappedSegment>> segments_;
  std::vector<std::shared_ptr<const store::SealedSegment>> sealed_;  // as in FilledSegments
  std::optional<TileMap> tiles_;                                     // of the first seal()
  std::atomic<bool> stop_seals_ = false;
  bool left_mapped_ = false;
  const ModelVersion id_;
  const TensorSet tensors_;
  const PackedLayout packed_;
  const std::filesystem::path directory_;
};

// The versions that trainers here are writing: begins, commits and abandons them. Control thread
// only; blocking work runs on the pool.
class PublicationDesk {
 public:
  // Both references outlive this. `directory` is where trainers write; what an earlier life of the
  // agent left there is removed.
  PublicationDesk(CopyHost& host, boost::asio::any_io_executor executor, async::TaskGroup& tasks,
                  std::filesystem::path directory);

  // `number`: of the publication, never used before. kExhausted: the trainer has too many.
  Result<void> begin(const std::shared_ptr<Client>& client, const proto::WorkerFrame& frame,
                     SessionId number);
  // All: kStale if the publication is over, or another client's. kInvalid: it has no such segment.
  Result<void> written(const std::shared_ptr<Client>& client, const proto::WorkerFrame& frame);
  Result<void> commit(const std::shared_ptr<Client>& client, const proto::WorkerFrame& frame);
  Result<void> abandon(const std::shared_ptr<Client>& client, const proto::WorkerFrame& frame);
  // The trainer is gone: its publications are abandoned.
  void drop(ClientId client);

 private:
  using PublicationPtr = std::shared_ptr<Publication>;
  // A rank of a joint publication. Its owner is the number of its publication.
  struct Rank {
    ModelVersion id;
    std::uint32_t rank = 0;
  };
  // Segments that the trainer has written.
  struct Seals {
    explicit Seals(boost::asio::any_io_executor executor) : ended(std::move(executor)) {}
    std::set<std::uint32_t> written;
    // One of them is being digested.
    bool running = false;
    async::Notifier ended;
  };
  struct Entry {
    ClientId client = 0;
    PublicationPtr publication;  // null while a joint publication gathers
    std::optional<Rank> rank = std::nullopt;
    // Null: no segment was written before the commit.
    std::shared_ptr<Seals> seals = nullptr;
  };
  Result<Entry*> find(ClientId client, SessionId number);
  async::Task<void> run_seals();
  async::Task<void> seal(SessionId number, PublicationPtr publication, std::shared_ptr<Seals> seals,
                         std::uint32_t segment);
  // False: a segment is still being digested at the deadline.
  static async::Task<bool> end_seals(std::shared_ptr<Seals> seals, TimePoint deadline);
  async::Task<void> run_begin(std::shared_ptr<Client> client, proto::WorkerFrame frame,
                              SessionId number);
  Result<PublicationPtr> begin_whole(const proto::PublishBegin& request);
  async::Task<Result<PublicationPtr>> begin_rank(std::shared_ptr<Client> client,
                                                 const proto::WorkerFrame& frame, SessionId number);
  async::Task<void> run_commit(std::shared_ptr<Client> client, proto::WorkerFrame frame,
                               Entry entry);
  async::Task<Result<Digest>> publish(const proto::WorkerFrame& frame, const Entry& entry);
  async::Task<void> run_abandon(std::shared_ptr<Client> client, proto::WorkerFrame frame,
                                Entry entry);
  async::Task<void> discard(PublicationPtr publication);
  Result<Entry> take(ClientId client, SessionId number);
  void leave(SessionId number, const Entry& entry);
  void close_one(ClientId client);

  CopyHost& host_;
  const boost::asio::any_io_executor executor_;
  async::TaskGroup& tasks_;
  const std::filesystem::path directory_;
  std::map<SessionId, Entry> open_;
  // Segments that were written, in that order. One of them is digested at a time, on all cores and
  // one thread of the pool. Those of publications that are not open any more are passed over.
  std::deque<std::pair<SessionId, std::uint32_t>> to_seal_;
  bool seals_run_ = false;
  std::map<ClientId, std::size_t> counts_;  // of each client, with those that begin or end
};

}  // namespace rekindle::worker
