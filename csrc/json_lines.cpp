// Lines of JSON as texts: the strings of some keys, unescaped, of lines that are plain objects.
// Plain C to the outside, called by megatron_zpp/preprocess/native.py; nothing here knows Python.
//
// A line that is in any way unusual (damaged, or a key escaped, or a value that is no string, or half
// of a surrogate pair) is left to Python's json, which says what is wrong with it, if anything is.
// The data must be UTF-8. Grammar: RFC 8259.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kVersion = 1;  // megatron_zpp/preprocess/native.py has the same
constexpr int kMaxDepth = 64;
constexpr int kMaxDigits = 1000;  // Python has a limit of its own

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "eight bytes are looked at as a word");

constexpr uint64_t every(uint64_t byte) { return byte * 0x0101010101010101u; }

// The high bit of the first byte that is `"`, `\` or below 0x20, and perhaps of some after it.
uint64_t specials(uint64_t word) {
  const uint64_t quote = word ^ every('"'), backslash = word ^ every('\\');
  const uint64_t found = ((quote - every(1)) & ~quote) | ((backslash - every(1)) & ~backslash) |
                         ((word - every(0x20)) & ~word);
  return found & every(0x80);
}

int hex(char one) {
  if (one >= '0' && one <= '9') return one - '0';
  const char small = static_cast<char>(one | 0x20);
  return small >= 'a' && small <= 'f' ? small - 'a' + 10 : -1;
}

// One line, from `at_` to `end_`; what is read of it must lie before `end_`.
class Line {
 public:
  Line(const char* begin, const char* end) : at_(begin), end_(end) {}

  // Writes the strings of the keys to `out`, and where they begin and end there to `places`.
  // Returns the new end of `out`, or null where the line is not plain.
  char* texts(const char* keys, int64_t num_keys, char* base, char* out, int64_t* places) {
    for (int64_t key = 0; key < num_keys; ++key) places[2 * key] = -1;
    space();
    if (!take('{')) return nullptr;
    space();
    if (!take('}')) {
      do {
        space();
        const char* name = at_ + 1;
        if (!plain_name()) return nullptr;
        const int64_t size = at_ - 1 - name;
        space();
        if (!take(':')) return nullptr;
        space();
        const int64_t key = which(keys, num_keys, name, size);
        if (key < 0) {
          if (!skip(0, out)) return nullptr;
        } else {
          char* const end = at_ < end_ && *at_ == '"' ? string(out) : nullptr;
          if (end == nullptr) return nullptr;
          places[2 * key] = out - base;
          places[2 * key + 1] = end - base;
          out = end;
        }
        space();
      } while (take(','));
      if (!take('}')) return nullptr;
    }
    space();
    if (at_ != end_) return nullptr;
    for (int64_t key = 0; key < num_keys; ++key) {
      if (places[2 * key] < 0) return nullptr;
    }
    return out;
  }

 private:
  bool take(char one) {
    const bool is_there = at_ < end_ && *at_ == one;
    at_ += is_there;
    return is_there;
  }

  void space() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r')) ++at_;
  }

  // A string without escapes.
  bool plain_name() {
    if (!take('"')) return false;
    while (at_ < end_ && *at_ != '"' && *at_ != '\\' && static_cast<uint8_t>(*at_) >= 0x20) ++at_;
    return take('"');
  }

  static int64_t which(const char* keys, int64_t num_keys, const char* name, int64_t size) {
    for (int64_t key = 0; key < num_keys; ++key) {
      const int64_t length = static_cast<int64_t>(std::strlen(keys));
      if (length == size && std::memcmp(keys, name, static_cast<size_t>(size)) == 0) return key;
      keys += length + 1;
    }
    return -1;
  }

  // Unescapes a string to `out`, up to 8 bytes further than its end, which is returned.
  char* string(char* out) {
    ++at_;
    for (;;) {
      uint64_t word = 0;
      std::memcpy(&word, at_, end_ - at_ < 8 ? static_cast<size_t>(end_ - at_) : 8);
      std::memcpy(out, &word, 8);
      const uint64_t found = specials(word);
      const int plain = found ? __builtin_ctzll(found) / 8 : 8;
      if (end_ - at_ <= plain) return nullptr;  // it does not end in this line
      at_ += plain;
      out += plain;
      if (!found) continue;
      if (*at_ == '"') {
        ++at_;
        return out;
      }
      if (*at_ != '\\' || end_ - at_ < 2) return nullptr;
      out = escape(out);
      if (out == nullptr) return nullptr;
    }
  }

  char* escape(char* out) {
    const char one = at_[1];
    at_ += 2;
    switch (one) {
      case '"': case '\\': case '/': *out = one; return out + 1;
      case 'n': *out = '\n'; return out + 1;
      case 't': *out = '\t'; return out + 1;
      case 'r': *out = '\r'; return out + 1;
      case 'b': *out = '\b'; return out + 1;
      case 'f': *out = '\f'; return out + 1;
      case 'u': return unicode(out);
      default: return nullptr;
    }
  }

  char* unicode(char* out) {
    int32_t code = four();
    if (code < 0 || (code >= 0xdc00 && code < 0xe000)) return nullptr;
    if (code >= 0xd800 && code < 0xdc00) {
      if (!take('\\') || !take('u')) return nullptr;
      const int32_t low = four();
      if (low < 0xdc00 || low >= 0xe000) return nullptr;
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static constexpr int kFirst[] = {0, 0xc0, 0xe0, 0xf0};
    *out++ = static_cast<char>(kFirst[more] | (code >> (6 * more)));
    for (int left = more - 1; left >= 0; --left) {
      *out++ = static_cast<char>(0x80 | ((code >> (6 * left)) & 0x3f));
    }
    return out;
  }

  int32_t four() {
    if (end_ - at_ < 4) return -1;
    int32_t code = 0;
    for (int place = 0; place < 4; ++place) {
      const int digit = hex(*at_++);
      if (digit < 0) return -1;
      code = code * 16 + digit;
    }
    return code;
  }

  // A value of any kind that nobody asked for; `scratch` is written to.
  bool skip(int depth, char* scratch) {
    if (at_ == end_ || depth > kMaxDepth) return false;
    switch (*at_) {
      case '"': return string(scratch) != nullptr;
      case '{': return skip_all('}', depth, scratch);
      case '[': return skip_all(']', depth, scratch);
      case 't': return word("true");
      case 'f': return word("false");
      case 'n': return word("null");
      default: return number();
    }
  }

  bool skip_all(char closing, int depth, char* scratch) {
    ++at_;
    space();
    if (take(closing)) return true;
    do {
      space();
      if (closing == '}') {
        if (at_ == end_ || *at_ != '"' || string(scratch) == nullptr) return false;
        space();
        if (!take(':')) return false;
        space();
      }
      if (!skip(depth + 1, scratch)) return false;
      space();
    } while (take(','));
    return take(closing);
  }

  bool word(const char* expected) {
    while (*expected != '\0') {
      if (!take(*expected++)) return false;
    }
    return true;
  }

  bool digits() {
    const char* const begin = at_;
    while (at_ < end_ && *at_ >= '0' && *at_ <= '9') ++at_;
    return at_ > begin && at_ - begin <= kMaxDigits;
  }

  bool number() {
    take('-');
    if (!take('0') && !digits()) return false;
    if (take('.') && !digits()) return false;
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      return digits();
    }
    return true;
  }

  const char* at_;
  const char* const end_;
};

}  // namespace

extern "C" {

int64_t zpp_json_version() { return kVersion; }

// Reads lines of `data` [size] until they or `capacity` lines are done; returns how many.
//
// `keys` are `num_keys` names, each with a zero byte after it. For line i, lines[2 i] and [2 i + 1]
// are its beginning and end in `data`, and places[2 (num_keys i + k)] and the next are where the text
// of key k begins and ends in `out` [size + 8]; -1 for the first key where the line is not plain.
int64_t zpp_json_lines(const char* data, int64_t size, const char* keys, int64_t num_keys,
                       int64_t capacity, char* out, int64_t* lines, int64_t* places) {
  char* free = out;
  int64_t count = 0;
  for (const char *at = data, *const stop = data + size; at < stop && count < capacity; ++count) {
    const void* const found = std::memchr(at, '\n', static_cast<size_t>(stop - at));
    const char* const end = found == nullptr ? stop : static_cast<const char*>(found);
    lines[2 * count] = at - data;
    lines[2 * count + 1] = end - data;
    int64_t* const own = places + 2 * num_keys * count;
    char* const after = Line(at, end).texts(keys, num_keys, out, free, own);
    if (after == nullptr) {
      own[0] = -1;
    } else {
      free = after;
    }
    at = end + 1;
  }
  return count;
}

}  // extern "C"
