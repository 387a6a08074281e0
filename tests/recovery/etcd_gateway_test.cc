#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <gtest/gtest.h>

#include "recovery/coordinator/etcd/etcd_state.h"
#include "recovery/coordinator/etcd/gateway.h"
#include "tests/support/process.h"

namespace rekindle::coordinator::etcd {
namespace {

TEST(EtcdEndpoints, AreUrlsOfOneScheme) {
  const auto two = parse_endpoints("http://10.0.0.1:2379,http://[fd00::3]:2379/");
  ASSERT_TRUE(two) << two.error().message();
  ASSERT_EQ(two->members.size(), 2u);
  EXPECT_EQ(two->members[0].to_string(), "10.0.0.1:2379");
  EXPECT_EQ(two->members[1].to_string(), "[fd00::3]:2379");
  EXPECT_FALSE(two->tls);
  const auto tls = parse_endpoints("https://a:1,https://b:2/");
  ASSERT_TRUE(tls) << tls.error().message();
  EXPECT_EQ(tls->members[1].to_string(), "b:2");
  EXPECT_TRUE(tls->tls);
  for (const char* bad : {"", "http://", "https://", "http://a:1,", "http://a:1/v3",
                          "https://a:1,http://b:2", "http://a:1,https://b:2", "a:1,https://b:2"}) {
    const auto refused = parse_endpoints(bad);
    ASSERT_FALSE(refused) << bad;
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid) << bad;
  }
}

TEST(EtcdBase64, GivesBackEveryByteAndRefusesOtherText) {
  std::string bytes;
  for (int i = 0; i < 300; ++i) {
    const auto back = from_base64(to_base64(bytes));
    ASSERT_TRUE(back) << i;
    EXPECT_EQ(*back, bytes) << i;
    bytes.push_back(static_cast<char>(i * 7));
  }
  EXPECT_EQ(to_base64("leader"), "bGVhZGVy");
  for (const char* bad : {"a", "abc", "ab*=", "ab c"}) EXPECT_FALSE(from_base64(bad)) << bad;
}

TEST(EtcdGateway, SaysWhichMembersDidNotAnswerAndWhy) {
  auto members = parse_endpoints("http://127.0.0.1:1,http://127.0.0.1:2");
  ASSERT_TRUE(members);
  Gateway gateway(*members);
  const auto answer = gateway.call("/v3/kv/range", {{"key", "YQ=="}}, std::chrono::seconds(1));
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), ErrorCode::kUnavailable);
  for (const char* part : {"127.0.0.1:1", "127.0.0.1:2", "refused"}) {
    EXPECT_NE(answer.error().message().find(part), std::string::npos) << answer.error().message();
  }
}

// As much of etcd's transactions as EtcdState needs, on a thread of its own. It can keep a request
// back, as a slow network does, and apply it later.
class FakeEtcd {
 public:
  FakeEtcd() : thread_([this] { serve(); }) {}
  ~FakeEtcd() {
    stop_ = true;
    boost::asio::ip::tcp::socket wake(io_);
    boost::system::error_code ignored;
    wake.connect(acceptor_.local_endpoint(), ignored);
    wake.close(ignored);
    thread_.join();
  }
  Access access() const {
    return *parse_endpoints(fmt::format("http://127.0.0.1:{}", acceptor_.local_endpoint().port()));
  }
  // A new life of the key.
  std::int64_t elect(const std::string& name) {
    const std::lock_guard lock(mutex_);
    keys_[to_base64("/rekindle/leader")] = {to_base64(name), ++revision_, revision_};
    return revision_;
  }
  // What somebody with the right to write to etcd can do.
  std::map<std::string, std::string> values() {
    const std::lock_guard lock(mutex_);
    std::map<std::string, std::string> all;
    for (const auto& [name, key] : keys_) all[*from_base64(name)] = *from_base64(key.value);
    return all;
  }
  void forge(const std::string& name, const std::string& value) {
    const std::lock_guard lock(mutex_);
    Key& key = keys_[to_base64(name)];
    key.value = to_base64(value);
    if (key.created == 0) key.created = key.changed = ++revision_;
  }
  void erase(const std::string& name) {
    const std::lock_guard lock(mutex_);
    keys_.erase(to_base64(name));
  }

  void keep_back_the_next() { keep_back_ = true; }
  void apply_what_was_kept_back() {
    const std::lock_guard lock(mutex_);
    (void)apply(kept_back_);
  }

 private:
  struct Key {
    std::string value;
    std::int64_t created = 0;
    std::int64_t changed = 0;
  };
  using json = nlohmann::json;

  void serve() {
    namespace http = boost::beast::http;
    while (!stop_) {
      boost::asio::ip::tcp::socket socket(io_);
      boost::system::error_code error;
      acceptor_.accept(socket, error);
      boost::beast::flat_buffer buffer;
      http::request<http::string_body> request;
      http::read(socket, buffer, request, error);
      if (error) continue;
      http::response<http::string_body> response{http::status::ok, 11};
      response.keep_alive(false);
      const std::lock_guard lock(mutex_);
      if (keep_back_.exchange(false)) {
        kept_back_ = json::parse(request.body());
        response.result(http::status::service_unavailable);
      } else {
        response.body() = apply(json::parse(request.body())).dump();
      }
      response.prepare_payload();
      http::write(socket, response, error);
    }
  }

  bool holds(const json& compare) const {
    const auto found = keys_.find(compare["key"]);
    const Key key = found == keys_.end() ? Key{} : found->second;
    const bool created = compare["target"] == "CREATE";
    const std::string wanted = compare[created ? "create_revision" : "mod_revision"];
    return wanted == std::to_string(created ? key.created : key.changed);
  }
  json apply(const json& txn) {
    bool succeeded = true;
    for (const auto& compare : txn["compare"]) succeeded = succeeded && holds(compare);
    json responses = json::array();
    for (const auto& request : txn[succeeded ? "success" : "failure"]) {
      responses.push_back(answer(request));
    }
    return {{"header", {{"revision", std::to_string(revision_)}}},
            {"succeeded", succeeded},
            {"responses", responses}};
  }
  json answer(const json& request) {
    if (request.contains("request_put")) {
      Key& key = keys_[request["request_put"]["key"]];
      key.value = request["request_put"]["value"];
      key.changed = ++revision_;
      if (key.created == 0) key.created = revision_;
      return {{"response_put", json::object()}};
    }
    if (request.contains("request_delete_range")) {
      keys_.erase(request["request_delete_range"]["key"]);
      ++revision_;
      return {{"response_delete_range", json::object()}};
    }
    const json& range = request["request_range"];
    const std::string from = *from_base64(range["key"].get<std::string>());
    const std::string end =
        range.contains("range_end") ? *from_base64(range["range_end"].get<std::string>()) : "";
    const std::size_t limit = std::stoul(range.value("limit", "1000000"));
    std::map<std::string, const Key*> sorted;  // by name, as base64 does not
    for (const auto& [name, key] : keys_) {
      const std::string plain = *from_base64(name);
      const bool in = end.empty() ? plain == from : plain >= from && plain < end;
      if (in) sorted[plain] = &key;
    }
    json pairs = json::array();
    for (const auto& [name, key] : sorted) {
      if (pairs.size() == limit) break;
      pairs.push_back({{"key", to_base64(name)},
                       {"value", key->value},
                       {"create_revision", std::to_string(key->created)},
                       {"mod_revision", std::to_string(key->changed)}});
    }
    return {{"response_range", {{"kvs", pairs}, {"more", sorted.size() > limit}}}};
  }

  boost::asio::io_context io_;
  boost::asio::ip::tcp::acceptor acceptor_{io_, {boost::asio::ip::address_v4::loopback(), 0}};
  std::atomic<bool> stop_{false};
  std::atomic<bool> keep_back_{false};
  std::mutex mutex_;  // of what follows
  std::map<std::string, Key> keys_;
  std::int64_t revision_ = 10;
  json kept_back_;
  std::thread thread_;  // last: it uses all of them
};

class EtcdStateTest : public ::testing::Test {
 protected:
  static std::vector<RecordWrite> epoch_of(std::uint64_t epoch) {
    return {{"meta", std::to_string(epoch)}, {"versions/m", "of " + std::to_string(epoch)}};
  }
  // After an answer that did not come, the next second's calls fail at once.
  static bool eventually_writes(EtcdState& state, std::uint64_t epoch) {
    for (int i = 0; i < 500; ++i) {
      if (state.write(epoch_of(epoch))) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  }
  EtcdState term() { return {{}, etcd_.access(), {1, etcd_.elect("me")}}; }
  Records stored() {
    EtcdState next({}, etcd_.access(), {1, etcd_.elect("next")});
    return *next.load();
  }
  static Records records_of(std::uint64_t epoch) {
    Records records;
    for (const auto& write : epoch_of(epoch)) records[write.key] = *write.value;
    return records;
  }
  FakeEtcd etcd_;
};

TEST_F(EtcdStateTest, AWriteThatArrivesLateDoesNotUndoALaterOne) {
  EtcdState state = term();
  EXPECT_EQ(*state.load(), Records{});
  ASSERT_TRUE(state.write(epoch_of(1)));
  etcd_.keep_back_the_next();
  EXPECT_EQ(state.write(epoch_of(2)).error().code(), ErrorCode::kUnavailable);
  ASSERT_TRUE(eventually_writes(state, 3));
  etcd_.apply_what_was_kept_back();
  EXPECT_EQ(stored(), records_of(3));
}

TEST_F(EtcdStateTest, AWriteWhoseAnswerWasLostIsWrittenOver) {
  EtcdState state = term();
  ASSERT_TRUE(state.load());
  etcd_.keep_back_the_next();
  EXPECT_FALSE(state.write(epoch_of(2)));
  etcd_.apply_what_was_kept_back();
  ASSERT_TRUE(eventually_writes(state, 3));
  EXPECT_TRUE(state.write(epoch_of(4)));
  EXPECT_EQ(stored(), records_of(4));
}

TEST_F(EtcdStateTest, WhatSomebodyElseWroteIsNotWrittenOver) {
  const Term same{1, etcd_.elect("me")};
  EtcdState state({}, etcd_.access(), same);
  EtcdState other({}, etcd_.access(), same);
  ASSERT_TRUE(state.load());
  ASSERT_TRUE(other.load());
  ASSERT_TRUE(state.write(epoch_of(1)));
  const auto refused = other.write(epoch_of(2));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kStale);
  EXPECT_EQ(*state.load(), records_of(1));
}

TEST_F(EtcdStateTest, WhoHasBeenReplacedNeitherReadsNorWrites) {
  EtcdState state = term();
  ASSERT_TRUE(state.write(epoch_of(1)));
  etcd_.elect("another");
  EXPECT_EQ(state.write(epoch_of(2)).error().code(), ErrorCode::kStale);
  EXPECT_EQ(state.load().error().code(), ErrorCode::kStale);
  EXPECT_EQ(stored(), records_of(1));
}

TEST_F(EtcdStateTest, C2AWriteOfManyRecordsIsSplitAndReadInPages) {
  EtcdState state = term();
  ASSERT_TRUE(state.load());
  std::vector<RecordWrite> writes{{"meta", "1"}};
  Records expected{{"meta", "1"}};
  for (int i = 0; i < 2500; ++i) {
    const std::string key = fmt::format("versions/m@{:020}", i);
    writes.push_back({key, fmt::format("record {}", i)});
    expected[key] = *writes.back().value;
  }
  const auto written = state.write(writes);
  ASSERT_TRUE(written) << written.error().message();
  EXPECT_EQ(stored(), expected);
}

TEST_F(EtcdStateTest, AnEmptyWriteIsNoError) {
  EtcdState state = term();
  ASSERT_TRUE(state.write(epoch_of(1)));
  EXPECT_TRUE(state.write({}));
  EXPECT_EQ(stored(), records_of(1));
}

// A state with authentication, and somebody who can write to etcd but has not the key.
class SealedState : public EtcdStateTest {
 protected:
  SealedState() {
    options_.state_key_file = write_key("key", "the key of this fleet");
    EtcdState state = sealed_term();
    EXPECT_TRUE(state.load());
    EXPECT_TRUE(state.write({{"meta", "1"}, {"versions/a", "root A"}, {"versions/b", "root B"}}));
  }
  std::string write_key(const std::string& name, const std::string& text) {
    const auto file = tmp_ / name;
    rekindle::testing::write_file(file, text);
    std::filesystem::permissions(file, std::filesystem::perms(0600));
    return file;
  }
  EtcdState sealed_term() { return {options_, etcd_.access(), {1, etcd_.elect("me")}}; }
  Records loaded() {
    EtcdState state = sealed_term();
    const auto records = state.load();
    EXPECT_TRUE(records) << records.error().message();
    return records ? *records : Records{};
  }
  void expect_refused(ErrorCode code, const std::string& says) {
    EtcdState state = sealed_term();
    const auto records = state.load();
    ASSERT_FALSE(records) << says;
    EXPECT_EQ(records.error().code(), code) << records.error().message();
    EXPECT_NE(records.error().message().find(says), std::string::npos) << records.error().message();
    EXPECT_EQ(records.error().message().find('\n'), std::string::npos);
  }
  static inline const Records kWritten = {
      {"meta", "1"}, {"versions/a", "root A"}, {"versions/b", "root B"}};
  rekindle::testing::TempDir tmp_;
  EtcdOptions options_;
};

TEST_F(SealedState, IsReadByTheNextLeader) {
  EXPECT_EQ(loaded(), kWritten);
  EtcdState state = sealed_term();
  ASSERT_TRUE(state.load());
  ASSERT_TRUE(state.write({{"meta", "2"}, {"versions/a", std::nullopt}, {"versions/c", "root C"}}));
  EXPECT_EQ(loaded(), (Records{{"meta", "2"}, {"versions/b", "root B"}, {"versions/c", "root C"}}));
}

TEST_F(SealedState, AnInventedVersionIsRefused) {
  etcd_.forge("/rekindle/versions/evil", "another root");
  expect_refused(ErrorCode::kCorrupt, "/rekindle/versions/evil in etcd carries no authentication");
  etcd_.forge("/rekindle/versions/evil", etcd_.values()["/rekindle/versions/a"]);
  expect_refused(ErrorCode::kCorrupt, "/rekindle/versions/evil in etcd was not written with this");
}

TEST_F(SealedState, AChangedOrSwappedValueIsRefused) {
  auto values = etcd_.values();
  std::string changed = values["/rekindle/versions/a"];
  changed.back() = 'B';
  etcd_.forge("/rekindle/versions/a", changed);
  expect_refused(ErrorCode::kCorrupt, "/rekindle/versions/a in etcd was not written");
  etcd_.forge("/rekindle/versions/a", values["/rekindle/versions/b"]);
  etcd_.forge("/rekindle/versions/b", values["/rekindle/versions/a"]);
  expect_refused(ErrorCode::kCorrupt, "/rekindle/versions/a in etcd was not written");
  etcd_.forge("/rekindle/versions/a", values["/rekindle/versions/a"]);
  etcd_.forge("/rekindle/versions/b", values["/rekindle/versions/b"]);
  for (const std::size_t size : {0u, 5u, 20u, 37u}) {
    etcd_.forge("/rekindle/meta", values["/rekindle/meta"].substr(0, size));
    expect_refused(ErrorCode::kCorrupt, "/rekindle/meta in etcd");
  }
  etcd_.forge("/rekindle/meta", values["/rekindle/versions/a"]);
  expect_refused(ErrorCode::kCorrupt, "/rekindle/meta in etcd was not written");
}

TEST_F(SealedState, ARecordThatWasTakenAwayOrBroughtBackIsNoticed) {
  const auto before = etcd_.values();
  {
    EtcdState state = sealed_term();
    ASSERT_TRUE(state.load());
    ASSERT_TRUE(state.write({{"meta", "2"}, {"versions/a", "root A2"}}));
  }
  const auto after = etcd_.values();
  etcd_.forge("/rekindle/versions/a", before.at("/rekindle/versions/a"));
  expect_refused(ErrorCode::kCorrupt, "brought older ones back");
  etcd_.forge("/rekindle/versions/a", after.at("/rekindle/versions/a"));
  etcd_.forge("/rekindle/meta", before.at("/rekindle/meta"));
  expect_refused(ErrorCode::kCorrupt, "brought older ones back");
  etcd_.forge("/rekindle/meta", after.at("/rekindle/meta"));
  etcd_.erase("/rekindle/versions/b");
  expect_refused(ErrorCode::kCorrupt, "somebody took records away");
  etcd_.forge("/rekindle/versions/b", after.at("/rekindle/versions/b"));
  etcd_.erase("/rekindle/meta");
  expect_refused(ErrorCode::kCorrupt, "/rekindle/meta is missing in etcd");
}

TEST_F(SealedState, AnotherKeyOrNoneDoesNotReadIt) {
  options_.state_key_file = write_key("other", "the key of another fleet");
  expect_refused(ErrorCode::kCorrupt, "or the key is another one");
  options_.state_key_file.clear();
  expect_refused(ErrorCode::kInvalid, "give it as --etcd-state-key");
}

TEST_F(SealedState, AnOldStateIsAdoptedOnceAndOnlyWhenToldTo) {
  for (const auto& [name, value] : kWritten) etcd_.forge("/rekindle/" + name, value);
  expect_refused(ErrorCode::kCorrupt, "start with --etcd-adopt-unsigned");
  options_.adopt_unsigned = true;
  EXPECT_EQ(loaded(), kWritten);
  options_.adopt_unsigned = false;
  EXPECT_EQ(loaded(), kWritten);
}

TEST_F(SealedState, AnInterruptedAdoptionIsRepeatedAndNeverTakesAWrongMac) {
  etcd_.forge("/rekindle/versions/b", "root B");
  etcd_.forge("/rekindle/versions/c", "root C");
  options_.adopt_unsigned = true;
  Records with_c = kWritten;
  with_c["versions/c"] = "root C";
  EXPECT_EQ(loaded(), with_c);
  etcd_.forge("/rekindle/versions/c", etcd_.values()["/rekindle/versions/a"]);
  expect_refused(ErrorCode::kCorrupt, "/rekindle/versions/c in etcd was not written");
}

TEST_F(SealedState, StaysWholeWhenAnswersAreLost) {
  for (const bool applied : {true, false}) {
    EtcdState state = sealed_term();
    ASSERT_TRUE(state.load());
    etcd_.keep_back_the_next();
    EXPECT_FALSE(state.write({{"meta", "2"}, {"versions/x", "lost"}}));
    if (applied) etcd_.apply_what_was_kept_back();
    ASSERT_TRUE(eventually_writes(state, 3));
    if (!applied) etcd_.apply_what_was_kept_back();
    EXPECT_EQ(loaded()["versions/m"], "of 3");
  }
}

}  // namespace
}  // namespace rekindle::coordinator::etcd
