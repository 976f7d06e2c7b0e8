// Light highlighting: comments, strings, numbers and keywords, by family of languages, in one pass.

const MAX_LENGTH = 100_000; // characters; longer code is shown plain

const WORDS = {
  python: `
    and as assert async await break class continue def del elif else except finally for from global if
    import in is lambda match nonlocal not or pass raise return try while with yield None True False
    self
  `,
  script: `
    async await break case catch class const continue default delete do else enum export extends
    finally for from function if implements import in instanceof interface let new of private public
    readonly return static super switch this throw try type typeof var void while yield null undefined
    true false
  `,
  c: `
    auto bool break case catch char class const constexpr continue default delete do double else enum
    explicit extern false float for friend fn func go goto if impl import in inline int interface let
    long match mod mut namespace new nil null nullptr operator override package private protected pub
    public return self short signed sizeof static std string struct super switch template this throw
    trait true try type typedef typename union unsigned use using virtual void volatile where while
    chan defer fallthrough map range select var final extends implements instanceof synchronized
    throws async await dyn crate unsafe
  `,
  shell: `
    if then else elif fi for in do done while until case esac function return exit export local
    readonly set unset source alias echo cd sudo true false
  `,
  sql: `
    select from where and or not null is in insert into values update set delete create table drop
    alter add primary key foreign references index join left right inner outer on group by order
    having limit offset as distinct union all case when then else end exists between like default
    unique constraint view with
  `,
  data: `
    true false null yes no on off
  `,
};

const STRING = `"(?:[^"\\\\\\n]|\\\\.)*"|'(?:[^'\\\\\\n]|\\\\.)*'`; // closed on its line
const TRIPLE = `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`;
const TEMPLATE = "`(?:[^`\\\\]|\\\\.)*`?";
const NUMBER = "\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b";
const HASH = "#[^\\n]*";
const SLASHES = "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)";

const FAMILIES = {
  python: { comment: HASH, string: `${TRIPLE}|${STRING}`, words: WORDS.python },
  script: { comment: SLASHES, string: `${TEMPLATE}|${STRING}`, words: WORDS.script },
  c: { comment: SLASHES, string: STRING, words: WORDS.c },
  shell: { comment: "(?<=^|\\s)#[^\\n]*", string: STRING, words: WORDS.shell },
  sql: { comment: "--[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)", string: STRING, words: WORDS.sql, flags: "i" },
  data: { comment: HASH, string: STRING, words: WORDS.data },
  css: { comment: "\\/\\*[^]*?(?:\\*\\/|$)", string: STRING, words: "important" },
  markup: { comment: "<!--[^]*?(?:-->|$)", string: STRING, keyword: "<\\/?[A-Za-z][\\w:-]*|\\/?>" },
  diff: {
    comment: "^(?:@@|diff|index|---|\\+\\+\\+)[^\\n]*",
    string: "^\\+[^\\n]*",
    keyword: "^-[^\\n]*",
    flags: "m",
  },
};

/** Family → the names that fences give its languages. */
const NAMES = {
  python: "python py",
  script: "javascript js jsx typescript ts tsx",
  c: "c h cpp c++ cc cuda cu csharp cs java kotlin go rust rs swift scala zig php dart",
  shell: "sh bash shell zsh console dockerfile makefile",
  sql: "sql",
  data: "json jsonc yaml yml toml ini",
  css: "css scss",
  markup: "html xml svg vue",
  diff: "diff patch",
};

const LANGUAGES = new Map(
  Object.entries(NAMES).flatMap(([family, names]) => names.split(" ").map((name) => [name, family])),
);

const compiled = new Map();

function expressionOf(family) {
  if (!compiled.has(family)) {
    const { comment, string, words, keyword, flags = "" } = FAMILIES[family];
    const known = keyword ?? `\\b(?:${words.trim().split(/\s+/).join("|")})\\b`;
    const source = `(?<comment>${comment})|(?<string>${string})|(?<number>${NUMBER})|(?<keyword>${known})`;
    compiled.set(family, new RegExp(source, `g${flags}`));
  }
  return compiled.get(family);
}

/**
 * Code as nodes: plain text and spans of class `code-comment`, `code-string`, `code-number`, `code-keyword`.
 * A language that is not known gives one text node.
 */
export function highlight(code, language) {
  const family = LANGUAGES.get(language.toLowerCase());
  const out = document.createDocumentFragment();
  let done = 0;
  if (family && code.length <= MAX_LENGTH) {
    for (const match of code.matchAll(expressionOf(family))) {
      if (match[0] === "") continue;
      const kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
      const span = document.createElement("span");
      span.className = `code-${kind}`;
      span.textContent = match[0];
      out.append(code.slice(done, match.index), span);
      done = match.index + match[0].length;
    }
  }
  out.append(code.slice(done));
  return out;
}
