#include "tools/cli/publisher_keys.h"

#include <cerrno>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "recovery/rpc/credentials.h"
#include "src/base/settings_file.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/output.h"

namespace rekindle::cli {
namespace {

constexpr std::string_view kEndOfKey = "-----END PUBLIC KEY-----";

Result<std::vector<std::string>> read_public_keys(const std::string& path) {
  constexpr std::size_t kMaxBytes = std::size_t{1} << 20;
  TRY(const std::string text, read_trusted_file(path, kMaxBytes));
  std::vector<std::string> keys;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = text.find(kEndOfKey, begin);
    // A file without any key gets the error of the parser.
    if (end == std::string::npos && !keys.empty()) return keys;
    const std::size_t stop = end == std::string::npos ? text.size() : end + kEndOfKey.size();
    auto key = crypto::public_key_from_pem(text.substr(begin, stop - begin));
    if (!key) return fail(std::move(key).error().with_context(path));
    keys.push_back(std::move(*key));
    begin = stop;
  }
}

Result<void> write_new_file(const std::string& path, std::string_view text, mode_t mode) {
  const UniqueFd file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode));
  if (!file) {
    if (errno == EEXIST) {
      return fail(ErrorCode::kDenied, "{} exists; choose another name: a key is never overwritten",
                  path);
    }
    return fail_errno(errno, "create " + path);
  }
  if (::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) ||
      ::fsync(file.get()) != 0) {
    return fail_errno(errno, "write " + path);
  }
  return {};
}

Result<int> make_keys(const Settings& settings, const std::string& path) {
  const auto key = crypto::SigningKey::generate();
  const std::string public_path = path + ".pub";
  TRY_VOID(write_new_file(path, key.to_pem(), 0600));
  if (auto written = write_new_file(public_path, crypto::public_key_to_pem(key.public_key()), 0644);
      !written) {
    ::unlink(path.c_str());
    return fail(std::move(written).error());
  }
  const std::string id = crypto::key_id(key.public_key());
  print_result(settings.json, {{"key", id}, {"private", path}, {"public", public_path}},
               fmt::format("key {}\n  {} signs: rekindle publish --sign-key {}\n"
                           "  {} is for those who trust it: --trust-publisher {}\n",
                           id, printable(path), printable(path), printable(public_path),
                           printable(public_path)));
  return kExitOk;
}

Result<int> show_keys(const Settings& settings, const std::string& path) {
  TRY(const auto keys, read_public_keys(path));
  Json ids = Json::array();
  std::string text;
  for (const std::string& key : keys) {
    ids.push_back(crypto::key_id(key));
    text += crypto::key_id(key) + "\n";
  }
  print_result(settings.json, {{"keys", ids}}, text);
  return kExitOk;
}

}  // namespace

Result<crypto::SigningKey> read_sign_key(const std::string& path) {
  auto pem = rpc::read_private_key(path);
  if (!pem) return fail(std::move(pem).error().with_context("--sign-key"));
  auto key = crypto::SigningKey::from_pem({pem->data(), pem->size()});
  if (!key) return fail(std::move(key).error().with_context("--sign-key " + path));
  return key;
}

Result<PublisherTrust> read_trust(const std::vector<std::string>& values) {
  PublisherTrust trust;
  for (const std::string& value : values) {
    const std::size_t equals = value.find('=');
    const std::string models = equals == std::string::npos ? "*" : value.substr(0, equals);
    const std::string file = equals == std::string::npos ? value : value.substr(equals + 1);
    auto keys = read_public_keys(file);
    if (!keys) return fail(std::move(keys).error().with_context("--trust-publisher " + value));
    for (std::string& key : *keys) {
      if (auto added = trust.add(models, std::move(key)); !added) {
        return fail(std::move(added).error().with_context("--trust-publisher " + value));
      }
    }
  }
  return trust;
}

void add_trust_option(Command& command, std::vector<std::string>& values) {
  command
      .option("--trust-publisher", values,
              "Only versions that a key in this file has signed (`rekindle keys`); with MODELS\n"
              "('qwen3*') only for these models; repeat for several keys [all publishers]")
      .type_name("[MODELS=]FILE")
      .one_word();
}

void add_keys(Command& app, Session& session) {
  Command keys = app.command("keys", "Make and show the keys with which publishers sign versions.");
  keys.require_command();
  auto path = std::make_shared<std::string>();
  Command make = keys.command(
      "new",
      "Make an Ed25519 key: FILE (mode 0600) for `publish --sign-key`, and FILE.pub for those who\n"
      "trust this publisher: `--trust-publisher FILE.pub`.");
  make.option("FILE", *path, "The file of the private key").required();
  make.runs(session, "keys new", [&session, path] { return make_keys(session.settings, *path); });
  Command show = keys.command("show", "Print the ids of the public keys in a file.");
  show.option("FILE", *path, "A file of public keys").required();
  show.runs(session, "keys show", [&session, path] { return show_keys(session.settings, *path); });
}

}  // namespace rekindle::cli
