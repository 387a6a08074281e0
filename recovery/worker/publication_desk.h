#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>

#include "proto/worker.pb.h"
#include "recovery/worker/agent_host.h"
#include "recovery/worker/client.h"
#include "recovery/worker/core/worker_session.h"
#include "recovery/worker/publication.h"
#include "src/async/task_group.h"

namespace rekindle::worker {

// The versions that trainers here are writing: begins, commits and abandons them. Control thread
// only; blocking work runs on the pool.
class PublicationDesk {
 public:
  // Both references outlive this. `directory` is where trainers write; what an earlier life of the
  // agent left there is removed.
  PublicationDesk(CopyHost& host, async::TaskGroup& tasks, std::filesystem::path directory);

  // `number`: of the publication, never used before. kExhausted: the trainer has too many.
  Result<void> begin(const std::shared_ptr<Client>& client, const proto::WorkerFrame& frame,
                     SessionId number);
  // Both: kStale if the publication is over, or another client's.
  Result<void> commit(const std::shared_ptr<Client>& client, const proto::WorkerFrame& frame);
  Result<void> abandon(const std::shared_ptr<Client>& client, const proto::WorkerFrame& frame);
  // The trainer is gone: its publications are abandoned.
  void drop(ClientId client);

 private:
  using PublicationPtr = std::unique_ptr<Publication>;
  struct Entry {
    ClientId client = 0;
    PublicationPtr publication;
  };
  async::Task<void> run_begin(std::shared_ptr<Client> client, proto::WorkerFrame frame,
                              SessionId number);
  async::Task<void> run_commit(std::shared_ptr<Client> client, proto::WorkerFrame frame,
                               PublicationPtr publication);
  async::Task<void> run_abandon(std::shared_ptr<Client> client, proto::WorkerFrame frame,
                                PublicationPtr publication);
  async::Task<void> discard(PublicationPtr publication);
  Result<PublicationPtr> take(ClientId client, SessionId number);
  void close_one(ClientId client);

  CopyHost& host_;
  async::TaskGroup& tasks_;
  const std::filesystem::path directory_;
  std::map<SessionId, Entry> open_;
  std::map<ClientId, std::size_t> counts_;  // of each client, with those that begin or end
};

}  // namespace rekindle::worker
