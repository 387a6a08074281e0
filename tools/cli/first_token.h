#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "recovery/rpc/http_client.h"
#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::cli {

struct FirstTokenArgs {
  // "http://HOST:PORT/PATH"; "": none.
  std::string url;
  // Posted to the URL; "": a GET.
  std::string body;
  // For /bin/sh, instead of a URL.
  std::string command;
};

// Repeats a request to an engine, in another thread, until it succeeds: an HTTP status of 2xx,
// or a command that exits with 0.
class FirstToken {
 public:
  // Null: the user asks for none. kInvalid names what is wrong.
  static Result<std::unique_ptr<FirstToken>> create(const FirstTokenArgs& args);
  // Ends the request that runs.
  ~FirstToken();
  FirstToken(const FirstToken&) = delete;
  FirstToken& operator=(const FirstToken&) = delete;

  // Begins to ask. A second call does nothing.
  Result<void> start(TimePoint give_up);
  // When the first request has succeeded.
  std::optional<TimePoint> succeeded() const;
  // Why the last request has failed.
  std::string last_failure() const;

 private:
  explicit FirstToken(FirstTokenArgs args) : args_(std::move(args)) {}
  void ask_until(TimePoint give_up);
  Result<void> ask_server(TimePoint deadline);
  Result<void> run_command(TimePoint deadline) const;

  const FirstTokenArgs args_;
  std::string path_;
  std::optional<rpc::HttpClient> client_;
  std::atomic<bool> stopping_{false};
  // The thread is at its end.
  std::atomic<bool> over_{false};
  mutable std::mutex mutex_;
  std::optional<TimePoint> succeeded_;
  std::string last_failure_ = "no request was sent";
  std::thread thread_;
};

}  // namespace rekindle::cli
