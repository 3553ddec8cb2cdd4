//! The vocabulary of the project: retired words do not come back.

use std::fs;

use build_tools::command::workspace;
use regex::Regex;
use walkdir::WalkDir;

/// A line of `retired-words.txt`.
struct RetiredWord {
    pattern: Regex,
    replacement: String,
    /// Files that may use it.
    exceptions: Vec<String>,
}

fn retired_words(text: &str) -> Vec<RetiredWord> {
    let mut words = Vec::<RetiredWord>::new();
    for line in text.lines().filter(|it| !it.is_empty() && !it.starts_with('#')) {
        if let Some(exception) = line.strip_prefix("  except ") {
            let (file, reason) = exception.split_once(": ").expect("an exception has a reason");
            assert!(!reason.is_empty());
            words.last_mut().expect("an exception follows a word").exceptions.push(file.to_owned());
        } else {
            let (pattern, replacement) = line.split_once(" => ").expect("a word has a replacement");
            let pattern = Regex::new(pattern).expect("it is a regular expression");
            words.push(RetiredWord { pattern, replacement: replacement.to_owned(), exceptions: Vec::new() });
        }
    }
    words
}

/// Every text file of the workspace, by its path from the root.
fn texts() -> impl Iterator<Item = (String, String)> {
    const SKIPPED: [&str; 6] = ["target", ".git", "corpus", "Cargo.lock", "LICENSE", "retired-words.txt"];
    let root = workspace();
    let entries =
        WalkDir::new(root).into_iter().filter_entry(|it| SKIPPED.iter().all(|name| it.file_name() != *name));
    entries.filter_map(move |it| {
        let path = it.expect("the folder can be listed").into_path();
        let file = path.strip_prefix(root).expect("it is below the root").to_string_lossy().into_owned();
        Some((file, fs::read_to_string(path).ok()?))
    })
}

#[test]
fn no_retired_word_is_left() {
    let words = retired_words(&fs::read_to_string(workspace().join("tests/retired-words.txt")).unwrap());
    let mut found = Vec::new();
    let mut files = 0;
    for (file, text) in texts() {
        files += 1;
        for word in words.iter().filter(|it| !it.exceptions.contains(&file)) {
            for (number, line) in (1..).zip(text.lines()) {
                if let Some(it) = word.pattern.find(line) {
                    found.push(format!("{file}:{number}: `{}`: write {}", it.as_str(), word.replacement));
                }
            }
        }
    }
    assert!(files > 400, "only {files} files were read");
    assert!(found.is_empty(), "{}", found.join("\n"));
}
